"""Start `vllm serve` with KVBM.

MODEL comes first. KVBM's options may stand anywhere after it; every other argument goes to `vllm serve` as it is. The
command checks the settings and the machine, prints the command line and then becomes `vllm serve`. It stops where
`kvbm doctor --quick` finds something wrong.

examples:
  kvbm serve Qwen/Qwen3-8B --cpu-gb 100
  kvbm serve Qwen/Qwen3-8B --cpu-gb 100 --disk-gb 400 --disk-dir /mnt/nvme/kvbm --tensor-parallel-size 2
  kvbm serve Qwen/Qwen3-8B --cpu-gb 100 --print             only print the command
`kvbm size MODEL` says how many GB to choose.
"""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from kvbm.config import load, require_tier

NAME = "serve"
HELP = "start `vllm serve` with KVBM"
PASSES_ON = True  # arguments of vLLM

_VARIABLES = {
    "cpu_gb": "DYN_KVBM_CPU_CACHE_GB", "disk_gb": "DYN_KVBM_DISK_CACHE_GB", "disk_dir": "DYN_KVBM_DISK_CACHE_DIR",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--cpu-gb", metavar="GB", help="host memory for the cache (DYN_KVBM_CPU_CACHE_GB)")
    parser.add_argument("--disk-gb", metavar="GB", help="size of the disk tier (DYN_KVBM_DISK_CACHE_GB)")
    parser.add_argument("--disk-dir", metavar="DIR", help="its directory (DYN_KVBM_DISK_CACHE_DIR)")
    parser.add_argument("--no-metrics", action="store_true", help="without the status page (DYN_KVBM_METRICS=0)")
    parser.add_argument("--force", action="store_true", help="start although a check of the machine has failed")
    parser.add_argument("--print", action="store_true", help="print the command instead of running it")


def run(args: argparse.Namespace) -> int:
    from kvbm.engines.vllm.transfer_config import EXAMPLE, OPTION, on_command_line

    if args.argv[1] != args.model:  # or the value of one of vLLM's options would pass for it
        return _fail(f"MODEL comes first, and {args.argv[1]!r} is in its place: `kvbm serve MODEL [options]`")
    if on_command_line(args.rest) is not None:
        return _fail(f"{OPTION} is what this command adds; leave it out, or use `vllm serve` itself")
    given = {variable: value for name, variable in _VARIABLES.items() if (value := getattr(args, name)) is not None}
    if args.no_metrics or "DYN_KVBM_METRICS" not in os.environ:
        given["DYN_KVBM_METRICS"] = "0" if args.no_metrics else "1"
    environment = {**os.environ, **given}
    if args.disk_dir is not None and "DYN_KVBM_DISK_CACHE_GB" not in environment:
        return _fail(f"--disk-dir {args.disk_dir} needs a size: add --disk-gb GB")
    config = load(environ=environment)
    require_tier(config)
    beside = Path(sys.executable).with_name("vllm")  # of this environment; some images have it elsewhere
    vllm = str(beside) if beside.exists() else shutil.which("vllm")
    command = [vllm or "vllm", "serve", args.model, OPTION, EXAMPLE, *args.rest]
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
    print(f"{settings} {shlex.join(command)}", file=sys.stdout if args.print else sys.stderr, flush=True)
    if args.print:
        return 0
    if vllm is None:
        return _fail(f"vLLM is not installed in {sys.prefix}; install kvbm into the environment that has it")
    if _is_wrong(environment) and not args.force:
        return _fail("not started. Cure what is marked BAD, or add --force to start all the same")
    if config.metrics:
        print(f"status page: http://{config.metrics_host}:{config.metrics_port}", file=sys.stderr, flush=True)
    os.execve(vllm, command, environment)
    return 1  # os.execve does not return


def _is_wrong(environment: dict[str, str]) -> bool:
    """Print what `kvbm doctor --quick` finds wrong: most of it would stop the engine minutes later."""
    from kvbm.cli.doctor import show
    from kvbm.doctor import CHECKS, Examination, examine

    case = Examination(url="http://127.0.0.1:0", quick=True, environ=environment)
    wrong = [show(check, finding, color=False) for check, finding in examine(case, CHECKS) if finding.level == "bad"]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr, flush=True)
    return bool(wrong)


def _fail(problem: str) -> int:
    print(f"kvbm serve: {problem}", file=sys.stderr)
    return 2
