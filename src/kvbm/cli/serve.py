"""Start `vllm serve` with KVBM.

MODEL comes first. KVBM's options may stand anywhere after it; every other argument goes to `vllm serve` as it is. The
command checks the settings, the port and the machine, prints the command line and then becomes `vllm serve`. It stops
where `kvbm doctor --quick` finds a fault: too little memory, a misspelt setting, an unusable disk directory. With
--print it reports these faults on standard error, and prints the command all the same, with exit status 0: the command
may be meant for another machine. `kvbm doctor --quick` has a status for this one.

examples:
  kvbm serve Qwen/Qwen3-8B --cpu-gb 100
  kvbm serve Qwen/Qwen3-8B --cpu-gb 100 --disk-gb 400 --disk-dir /mnt/nvme/kvbm --tensor-parallel-size 2
  kvbm serve Qwen/Qwen3-8B --cpu-gb 100 --print             only print the command
`kvbm size MODEL` says how many GB to choose.

With a tier that outlives the engine, vLLM also gets --shutdown-timeout 10, unless it is given: after SIGTERM, vLLM lets
running requests and writes to that tier finish for up to 10 s, instead of killing the engine at once.
"""

import argparse
import difflib
import errno
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from kvbm.config import Config, ConfigError, load, require_tier

NAME = "serve"
HELP = "start `vllm serve` with KVBM"
PASSES_ON = True  # arguments of vLLM

_FLAGS = {
    "DYN_KVBM_CPU_CACHE_GB": "--cpu-gb", "DYN_KVBM_DISK_CACHE_GB": "--disk-gb", "DYN_KVBM_DISK_CACHE_DIR": "--disk-dir",
}  # fmt: skip
# Options with which KVBM would not work: a value that does no harm, and what any other does.
_INSTEAD = {
    "--kv-offloading-size": ("", "starts vLLM's own offloading in KVBM's place"),
    "--decode-context-parallel-size": ("1", "turns KVBM off, which does not support context parallelism"),
    "-dcp": ("1", "turns KVBM off, which does not support context parallelism"),
    "--prefill-context-parallel-size": ("1", "turns KVBM off, which does not support context parallelism"),
    "-pcp": ("1", "turns KVBM off, which does not support context parallelism"),
}
_MODEL_FILES = ("config.json", "params.json", "*.gguf")  # vLLM needs one of them
_DEFAULT_PORT = 8000  # vLLM's
_NOT_HERE = "as things are, this command would not start here"
_SHUTDOWN = "--shutdown-timeout"
_SHUTDOWN_SECONDS = "10"  # more than the engine takes to write what is queued (kvbm.runtime.flush)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "kvbm serve MODEL [--cpu-gb GB] [--disk-gb GB] [--disk-dir DIR] [--print] [any option of `vllm serve`]"
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--cpu-gb", metavar="GB", help="host memory for the cache (DYN_KVBM_CPU_CACHE_GB)")
    parser.add_argument("--disk-gb", metavar="GB", help="size of the disk tier (DYN_KVBM_DISK_CACHE_GB)")
    parser.add_argument("--disk-dir", metavar="DIR", help="its directory (DYN_KVBM_DISK_CACHE_DIR)")
    parser.add_argument("--no-metrics", action="store_true", help="without the status page (DYN_KVBM_METRICS=0)")
    parser.add_argument("--force", action="store_true", help="start although a check of the machine has failed")
    parser.add_argument("--print", action="store_true", help="check, and print the command instead of running it")


def run(args: argparse.Namespace) -> int:
    from kvbm.engines.vllm.sockets import give_directory
    from kvbm.engines.vllm.transfer_config import EXAMPLE, OPTION, on_command_line

    if args.argv[1] != args.model:  # or the value of one of vLLM's options would pass for it
        return _fail(f"MODEL comes first, and {args.argv[1]!r} is in its place: `kvbm serve MODEL [options]`")
    for name, value in (("MODEL", args.model), ("--disk-dir", args.disk_dir)):
        if value is not None and not value.strip():
            return _fail(f"{name} is empty")
    if unusable := _model_problem(args.model):
        return _fail(unusable)
    if on_command_line(args.rest) is not None:
        return _fail(f"{OPTION} is what this command adds; leave it out, or use `vllm serve` itself")
    for option in (each.partition("=")[0] for each in args.rest if each.startswith("--")):
        # The nearest option of vLLM, --cpu-offload-gb, has a similarity of 0.67; typing errors have 0.8 and more.
        if near := difflib.get_close_matches(option.replace("_", "-"), _FLAGS.values(), 1, 0.8):
            return _fail(f"{option} is an option of neither KVBM nor vLLM; did you mean {near[0]}?")
    for option, (harmless, what) in _INSTEAD.items():
        if _option(args.rest, option) not in (None, harmless):
            return _fail(f"{option} {what}; leave it out, or use `vllm serve` itself")
    flags = {name: flag for name, flag in _FLAGS.items() if _value(args, flag) is not None}
    given: dict[str, str] = {name: _value(args, flag) for name, flag in flags.items()}
    if args.no_metrics or "DYN_KVBM_METRICS" not in os.environ:
        given["DYN_KVBM_METRICS"] = "0" if args.no_metrics else "1"
    environment = {**os.environ, **given}
    if args.disk_dir is not None and "DYN_KVBM_DISK_CACHE_GB" not in environment:
        return _fail(f"--disk-dir {args.disk_dir} needs a size: add --disk-gb GB")
    try:
        config = load(environ=environment)
    except ConfigError as error:
        return _fail(_by_flags(str(error), flags))
    try:
        require_tier(config)
    except ConfigError:
        return _fail("the cache has no size: add --cpu-gb GB. `kvbm size MODEL` says how many GB to choose")
    beside = Path(sys.executable).with_name("vllm")  # of this environment; some images have it elsewhere
    vllm = str(beside) if beside.exists() else shutil.which("vllm")
    command = [vllm or "vllm", "serve", args.model, OPTION, EXAMPLE, *_shutdown(config, args.rest), *args.rest]
    line = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in given.items()), shlex.join(command)])
    problem = f"vLLM is not installed in {sys.prefix}; install kvbm into the environment that has it"
    if vllm is not None:
        problem = _port_problem(args.rest, config.metrics_port if config.metrics else 0)
    if problem and not args.print:
        return _fail(problem)
    wrong = _faults(environment, flags)
    print("".join(f"{each}\n" for each in wrong), end="", file=sys.stderr)
    if args.print:
        if problem or wrong:
            _fail(f"{problem}\n{_NOT_HERE}" if problem else _NOT_HERE)
        print(line)
        return 0
    if wrong and not args.force:
        return _fail("not started. Cure what is marked BAD, or add --force to start all the same")
    print(line, file=sys.stderr)
    if config.metrics:
        print(f"status page: http://{config.metrics_host}:{config.metrics_port}", file=sys.stderr)
    sys.stderr.flush()
    give_directory(environment)
    os.execve(command[0], command, environment)
    return 1  # os.execve does not return


def _model_problem(model: str) -> str:
    """Why vLLM could not load it. It says so 20 s later, at the end of a traceback."""
    folder = Path(model).expanduser()
    if model.startswith((".", "/", "~")) and not folder.exists():
        return f"MODEL {model} does not exist. It takes a folder, or a name on the Hugging Face hub"
    if folder.is_dir():
        is_model = any(any(folder.glob(pattern)) for pattern in _MODEL_FILES)
        return "" if is_model else f"MODEL {model} is a folder without {', '.join(_MODEL_FILES)}: no model is in it"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "on", "yes") and not folder.exists():
        from kvbm.cli.model_kv import FetchError, ModelError, read_model

        try:
            read_model(model)
        except FetchError:
            return f"MODEL {model} has not been downloaded here, and HF_HUB_OFFLINE forbids to download it"
        except ModelError:
            pass  # vLLM may know what to do with it
    return ""


def _value(args: argparse.Namespace, flag: str) -> str:
    value: str = getattr(args, flag.removeprefix("--").replace("-", "_"))
    return value


def _faults(environment: Mapping[str, str], flags: Mapping[str, str]) -> list[str]:
    """What `kvbm doctor --quick` finds wrong: most of it would stop the engine minutes later."""
    from kvbm.cli.doctor import show
    from kvbm.doctor import CHECKS, Examination, examine

    # The engine that is to start matters, not one that runs: port 0 has none.
    case = Examination(url="http://127.0.0.1:0", quick=True, environ=environment)
    shown = []
    for check, finding in examine(case, CHECKS):
        if finding.level == "bad":
            by_flags = {} if finding.name == "setting-misspelt" else flags
            text, cure = (_by_flags(each, by_flags) for each in (finding.text, finding.cure))
            shown.append(show(check, msgspec.structs.replace(finding, text=text, cure=cure), color=False))
    return shown


def _by_flags(text: str, flags: Mapping[str, str]) -> str:
    """A message with the flags that the user gave in place of the variables that they set."""
    for name, flag in flags.items():
        text = re.sub(rf"(export )?{name}=('[^']*') \(environment\)", rf"{flag} \2", text)
        text = re.sub(rf"(export )?{name}=", f"{flag} ", text)
        text = re.sub(rf"\b{name}\b", flag, text)
    return text


def _shutdown(config: Config, rest: Sequence[str]) -> tuple[str, ...]:
    """The option that lets vLLM finish at SIGTERM, where the installed vLLM has it and the user has not given it."""
    from kvbm.tiers import registry

    if not registry.outlives_engine(config) or any(_option(rest, name) is not None for name in (_SHUTDOWN, "--config")):
        return ()
    try:  # an import of vLLM takes seconds
        options = metadata.distribution("vllm").locate_file("vllm/engine/arg_utils.py").read_text()
    except (metadata.PackageNotFoundError, OSError):
        return ()
    return (_SHUTDOWN, _SHUTDOWN_SECONDS) if f'"{_SHUTDOWN}"' in options else ()


def _port_problem(rest: Sequence[str], metrics_port: int = 0) -> str:
    """Why vLLM could not listen on its port: it tries only after it has loaded the weights, or ends in a traceback."""
    from kvbm.doctor.base import refusal

    if any(_option(rest, name) is not None for name in ("--uds", "--headless")):
        return ""
    text, host = _option(rest, "--port"), _option(rest, "--host") or ""
    if text is None and _option(rest, "--config") is not None:
        return ""  # the port may stand in that file
    if text is not None and (not text.isdecimal() or int(text) > 65535):
        return f"--port {text}: expected a whole number up to 65535"
    port = int(text or _DEFAULT_PORT)
    if port == metrics_port:
        return (
            f"port {port} is that of the status page too. Choose another with --port, or for the page with "
            "DYN_KVBM_METRICS_PORT"
        )
    if (error := refusal(host, port)) is None:
        return ""
    cure = "Choose an address of this machine with --host, and a port of 1024 or above with --port"
    if error.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else port - 1
        cure = f"`ss -ltnp 'sport = :{port}'` shows its program. Stop that, or choose another port: --port {other}"
    return f"cannot listen on port {port} of {host or 'this machine'}: {error.strerror or error}. {cure}"


def _option(words: Sequence[str], name: str) -> str | None:
    """The value of an option of vLLM, empty for a switch; None if it is not given. The last one counts."""
    found = None
    for at, word in enumerate(words):
        option, sign, value = word.partition("=")
        if option.replace("_", "-") == name:
            found = value if sign else next((each for each in words[at + 1 : at + 2] if not each.startswith("--")), "")
    return found


def _fail(problem: str) -> int:
    print(f"kvbm serve: {problem}", file=sys.stderr)
    return 2
