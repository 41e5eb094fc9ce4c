"""The examples of docs/autoscaling.md work as described."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from daskserve.autoscaling import AutoscalingContext, Decision, Sample
from daskserve.autoscaling.autoscaler import Autoscaler
from daskserve.autoscaling.groups import decide_together
from daskserve.autoscaling.policies import load_policy
from daskserve.options.autoscaling import BUILT_IN_POLICIES, AutoscalingConfig

TEXT = (Path(__file__).parent.parent / "docs/autoscaling.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(example: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(example, "docs/autoscaling.md", "exec", dont_inherit=True), namespace)
    return namespace


def example(name: str) -> Any:
    """Return an object that an example defines."""
    return next(found[name] for found in map(run, EXAMPLES) if name in found)


def test_every_policy_is_in_the_table() -> None:
    table = TEXT.partition("## Bounds, delays and steps")[0]
    assert re.findall(r"^\| `(\w+)` \| ", table, re.MULTILINE)[1:] == list(BUILT_IN_POLICIES)


def test_every_config_is_valid_and_gives_a_decision() -> None:
    configs = [run(example)["config"] for example in EXAMPLES if "\nconfig" in f"\n{example}"]
    assert len(configs) == 4
    for options in configs:
        step = Autoscaler("b", AutoscalingConfig(**options)).step(now=1, wall=1.7e9, current=1, target=1)
        assert step.error is None


def test_a_custom_policy_decides() -> None:
    policy = example("by_tokens")
    config = AutoscalingConfig(max_replicas=9, policy=policy, policy_kwargs={"per_replica": 500})
    context = AutoscalingContext("b", config, 1, 1, 1, 1, queries={"tokens_waiting": 1800})
    assert load_policy(config)(context) == Decision(4, "1800 tokens wait, 500 per replica wanted: 4")


def test_backends_are_scaled_together() -> None:
    options = next(found for found in map(run, EXAMPLES) if "together" in found)["together"]
    config = AutoscalingConfig(**options)
    contexts = {
        name: AutoscalingContext(name, config, 1, 1, 1, 1, samples=[Sample(1.0, ongoing, 0)])
        for name, ongoing in (("decoder", 7.0), ("speaker", 0.0))
    }
    policy = load_policy(config)
    found = asyncio.run(decide_together(policy, contexts))
    assert {name: each.replicas for name, each in found.items()} == {"decoder": 4, "speaker": 8}
    assert found["speaker"].reason == "2 for each of 4 decoder"
    alone = {"speaker": contexts["speaker"]}
    assert asyncio.run(decide_together(policy, alone))["speaker"].replicas == 1


def test_custom_statistics_decide() -> None:
    model = example("Model")()
    model.tokens_waiting = 2500
    values = {name: {"b#1": float(value)} for name, value in model.record_autoscaling_stats().items()}
    options = next(found for found in map(run, EXAMPLES) if "Model" in found)["config"]
    scaler = Autoscaler("b", AutoscalingConfig(**options, upscale_delay_s=0))
    scaler.observe(Sample(1.0, 0, 0), custom=values)
    assert scaler.step(now=1, wall=0, current=1, target=1).replicas == 3

    config = AutoscalingConfig(max_replicas=9)
    context = AutoscalingContext(
        "b", config, 1, 1, 2, 2, aggregated_metrics={"memory_share": {"b#1": 0.5, "b#2": 1.0}}
    )
    assert example("by_memory")(context) == Decision(
        3, "the fullest replica uses 100% of its memory, 80% wanted: 3"
    )
