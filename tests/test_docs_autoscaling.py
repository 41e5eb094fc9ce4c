"""The examples of docs/autoscaling.md do what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from daskserve.autoscaling import AutoscalingContext, Decision
from daskserve.autoscaling_config import BUILT_IN_POLICIES, AutoscalingConfig
from daskserve.control.autoscaling.autoscaler import Autoscaler
from daskserve.control.autoscaling.loading import load_policy

TEXT = (Path(__file__).parent.parent / "docs/autoscaling.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(example: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(example, "docs/autoscaling.md", "exec", dont_inherit=True), namespace)
    return namespace


def test_every_policy_is_in_the_table() -> None:
    table = TEXT.partition("## How wishes are tamed")[0]
    assert re.findall(r"^\| `(\w+)` \| ", table, re.MULTILINE)[1:] == list(BUILT_IN_POLICIES)


def test_every_config_is_valid_and_can_be_decided_by() -> None:
    configs = [run(example)["config"] for example in EXAMPLES if example.startswith("config")]
    assert len(configs) == 2
    for options in configs:
        step = Autoscaler("b", AutoscalingConfig(**options)).step(now=1, wall=1.7e9, current=1, target=1)
        assert step.error is None


def test_the_policy_of_ones_own_decides() -> None:
    policy = run(EXAMPLES[-1])["by_tokens"]
    config = AutoscalingConfig(max_replicas=9, policy=policy, policy_kwargs={"per_replica": 500})
    context = AutoscalingContext("b", config, 1, 1, 1, 1, queries={"tokens_waiting": 1800})
    assert load_policy(config)(context) == Decision(4, "1800 tokens wait, 500 per replica wanted: 4")
