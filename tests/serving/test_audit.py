"""Each optimization is found at work, or off, by evidence of the right strength."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_trace import TARGET, dspark_steps

from serving.audit import CHECKS, Observed, Row, audit, read_counters, rows_to_dicts
from serving.facts import Family
from serving.trace import make_trace, step_facts

ARGUMENTS = {
    "speculative_algorithm": "DSPARK",
    "tp_size": 1,
    "disable_overlap_schedule": False,
    "enable_fp32_lm_head": False,
    "quantization": None,
}
COUNTS = {"verify_graph": 100, "draft_graph": 100, "accept_eager": 100}
FACTS: dict[str, Any] = {
    "event_loop": "overlap",
    "needs_cpu_seq_lens": False,
    "attention": "FlashAttentionBackend",
    "commit_in_graph": False,
    "state_commit_after_verify": False,
    "verify_ids_in_graph": 0,
    "relayed_in_graph": 0,
    "proposal_in_graph": True,
    "draft_glue": None,
    "verify_glue": {"graph": 96, "eager": 2},
}
SEEN = Observed(
    ARGUMENTS,
    COUNTS,
    FACTS,
    frozenset(name for name, _ in TARGET) | {"_fused_kv_norm_rope_write_kernel"},
    step_facts(make_trace(dspark_steps())),
    Family.DENSE,
)


def by_name(observed: Observed) -> dict[str, Row]:
    return {row.name: row for row in audit(observed)}


def test_sglangs_default_for_a_dense_target() -> None:
    rows = by_name(SEEN)
    found = {n: (r.state, r.source) for n, r in rows.items() if r.wanted}
    assert found == {
        "overlap scheduling": ("active", "counter"),
        "lengths stay on the GPU": ("active", "counter"),
        "no blocking read": ("active", "trace"),
        "target from graphs": ("active", "counter"),
        "draft from graphs": ("active", "counter"),
        "graphs only": ("active", "trace"),
        "proposal in the draft graph": ("active", "counter"),
        "accept in the verify graph": ("off", "counter"),
        "draft keys and values in the verify graph": ("off", "counter"),
        "verify window from the draft graph": ("off", "counter"),
        "lengths relayed in the verify graph": ("off", "counter"),
        "metadata glue, target": ("active", "counter"),
        "metadata glue, draft": ("off", "counter"),
        "host-fed attention plans": ("active", "counter"),
        "PDL": ("off", "trace"),
        "fused draft KV write": ("active", "trace"),
        "bf16 lm_head": ("active", "argument (weak)"),
    }
    problems = [r["name"] for r in rows_to_dicts(rows.values()) if r["is_problem"]]
    assert problems == [n for n, (state, _) in found.items() if state == "off"]


def test_a_fold_that_works_is_seen() -> None:
    counts = {**COUNTS, "accept_eager": 1, "accept_graph": 99}
    facts = {**FACTS, "commit_in_graph": True, "relayed_in_graph": 99}
    rows = by_name(replace(SEEN, counts=counts, facts=facts))
    assert rows["accept in the verify graph"].state == "active"
    assert rows["accept in the verify graph"].evidence == "99 from graphs, 1 eagerly"
    assert rows["draft keys and values in the verify graph"].state == "active"
    assert rows["lengths relayed in the verify graph"].state == "active"


def test_kernels_of_our_own_are_wanted_where_they_were_asked_for() -> None:
    names = (
        "our own decode attention",
        "norms, rotation and store in one launch",
        "our own products of few rows",
        "norms inside the products around them",
    )
    assert not any(by_name(SEEN)[name].wanted for name in names)
    asked = replace(SEEN, facts={**FACTS, "own_kernels": "all"})
    assert all(by_name(asked)[name].is_problem for name in names)
    ran = {"decode_attention_kernel", "rope_store_kernel", "skinny_linear_add_kernel"}
    seen = by_name(replace(asked, kernels=asked.kernels | ran))
    assert [seen[name].state for name in names] == ["active"] * 4


def test_an_argument_is_weak_and_nothing_is_no_evidence() -> None:
    rows = by_name(Observed(ARGUMENTS, family=Family.DENSE))
    assert rows["overlap scheduling"].source == "argument (weak)"
    unknown = [r for r in rows.values() if r.state == "unknown"]
    assert {r.source for r in unknown} == {"no evidence"}
    assert len(unknown) >= 15
    assert not any(r.is_problem for r in unknown)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"event_loop": "normal"}, "overlap scheduling"),
        ({"needs_cpu_seq_lens": True}, "lengths stay on the GPU"),
        ({"attention": "FlashInferAttnBackend"}, "host-fed attention plans"),
        ({"proposal_in_graph": False}, "proposal in the draft graph"),
        ({"verify_glue": {"graph": 50, "eager": 50}}, "metadata glue, target"),
    ],
)
def test_what_is_off_is_found(facts: dict[str, Any], name: str) -> None:
    assert by_name(replace(SEEN, facts={**FACTS, **facts}))[name].is_problem


def test_eager_steps_and_waits_are_found() -> None:
    assert SEEN.step is not None
    slow = replace(SEEN.step, synchronizations=2.0, eager_kernels=40.0, overlapped_kernels=9.0)
    rows = by_name(replace(SEEN, step=slow, counts={"verify_eager": 10}))
    assert rows["no blocking read"].is_problem
    assert rows["graphs only"].is_problem
    assert rows["target from graphs"].is_problem
    assert rows["PDL"].state == "active"


def test_what_only_ling_wants() -> None:
    kernels = frozenset(
        {
            "fused_kda_conv_gating_verify_kernel",
            "moe_align_small_numel_kernel",
            "router_gate_matvec_kernel",
            "silu_and_mul_kernel",
            "trtllm_allreduce_fusion_kernel",
        }
    )
    arguments = {**ARGUMENTS, "tp_size": 4}
    facts = {**FACTS, "state_commit_after_verify": True}
    ling = Observed(arguments, COUNTS, facts, kernels, SEEN.step, Family.LING3)
    rows = by_name(ling)
    for name in (
        "fused KDA chain verify",
        "stage-then-commit of recurrent state",
        "pair-axis MoE align",
        "bf16 router gate",
        "all-reduce fusion",
    ):
        assert (rows[name].wanted, rows[name].state) == (True, "active"), name
    assert rows["SwiGLU in the up-GEMM epilogue"].is_problem
    quantized = replace(ling, arguments={**arguments, "quantization": "fp8"})
    assert not by_name(quantized)["SwiGLU in the up-GEMM epilogue"].wanted
    plain = by_name(replace(ling, arguments={"tp_size": 1}))
    assert not plain["fused KDA chain verify"].wanted
    assert not plain["all-reduce fusion"].wanted
    assert not plain["accept in the verify graph"].wanted


def test_every_check_says_what_its_absence_costs() -> None:
    assert len({c.name for c in CHECKS}) == len(CHECKS)
    assert all(c.cost for c in CHECKS)


def test_counters_of_all_ranks(tmp_path: Path) -> None:
    stem = str(tmp_path / "audit")
    with pytest.raises(ValueError, match="no file of a rank that decoded"):
        read_counters(stem)
    ranks = [({"verify_graph": 3}, 1), ({"verify_graph": 4, "accept_graph": 4}, 0), ({}, 0)]
    for pid, (counts, rank) in enumerate(ranks):
        text = json.dumps({"counts": counts, "facts": {"tp_rank": rank}})
        (tmp_path / f"audit.{pid}.json").write_text(text)
    counts, facts = read_counters(stem)
    assert counts == {"verify_graph": 7, "accept_graph": 4}
    assert facts == {"tp_rank": 0}
