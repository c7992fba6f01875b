"""Ask every leader of the deployment through Dynamo: their host tiers before and after they were emptied, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from dynamo.runtime import DistributedRuntime

from kvbm.control.dynamo import BlockManagerClient
from kvbm.control.socket import CommandError


async def main(expected: int) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), os.environ["DYN_DISCOVERY_BACKEND"], "tcp")
    everyone = BlockManagerClient(runtime)
    while len(instances := await everyone.instances()) < expected:
        await asyncio.sleep(0.2)
    found = []
    for instance in instances:
        leader = BlockManagerClient(runtime, instance)
        before = await leader.status("G2")
        reset = await leader.reset_blocks("G2", [1])
        try:
            await leader.reset_pool("tape")
            refused = ""
        except CommandError as error:
            refused = str(error)
        dropped = await leader.reset_pool("G2")
        after = await leader.status("host")
        found.append({
            "before": before, "missing": reset["not_found_blocks"], "refused": refused, "dropped": dropped,
            "after": after, "all": await leader.reset_all_pools(),
        })  # fmt: skip
    print(json.dumps(found))
    runtime.shutdown()


asyncio.run(asyncio.wait_for(main(int(sys.argv[1])), 60))
