"""New weights in a running engine: a worker refuses what was planned with blocks of the old ones."""

import time

import torch

from kvbm import config as settings
from kvbm.plans import Copy, LoadPlan, StepPlan, StorePlan
from kvbm.runtime.rank import Rank
from tiernames import HOST


def run(worker, plan):
    worker.begin(plan)
    worker.start_loads(plan)
    worker.start_stores(plan)
    end = time.monotonic() + 30
    news = 0
    while time.monotonic() < end:
        report = worker.poll().report
        news = news or report.weight_changes
        if report.loads or report.stores:
            return report, news
        time.sleep(0.001)
    raise TimeoutError("nothing has ended")


def test_a_worker_refuses_plans_until_the_leader_has_heard_of_new_weights():
    pool = torch.zeros(8, 2, 64, dtype=torch.int32)
    rank = Rank(settings.load(extra={"cpu_cache_override_num_blocks": 4}, environ={}, files=[]), 0, 1)
    rank.register({"layer": pool}, 8)
    rank.open()
    worker = rank.worker
    store = [StorePlan(1, Copy(HOST, [3], [2]))]
    load = [LoadPlan(2, "r", [Copy(HOST, [3], [5])], in_step=True)]
    report, news = run(worker, StepPlan(stores=store))
    assert (report.stores[0].ok, news) == (True, 0)
    worker.weights_changed()
    report, news = run(worker, StepPlan(loads=load))
    assert (report.loads[0].bad, news) == ([0], 1)
    report, news = run(worker, StepPlan(stores=store, changes_heard=[0]))
    assert (report.stores[0].ok, news) == (False, 1)  # again, until the leader has heard of it
    report, news = run(worker, StepPlan(stores=store, changes_heard=[1]))
    assert (report.stores[0].ok, news) == (True, 0)
    report, _ = run(worker, StepPlan(loads=load))
    assert report.loads[0].bad == []
    worker.weights_changed()
    report, news = run(worker, StepPlan(stores=store, changes_heard=[1]))
    assert (report.stores[0].ok, news) == (False, 2)
    rank.close()
