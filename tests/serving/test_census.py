"""Every microsecond of a known step is billed to the right class."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from fake_trace import DRAFT, TARGET, Steps, dspark_steps

from serving.census import ALL_REDUCE, RANK_WAIT, census, kernel_class
from serving.census_report import census_rows, census_svg, census_to_dict, write_picture
from serving.trace import make_trace, read_trace, step_facts

MILLI = 1e-3


def test_a_known_step() -> None:
    found = census([make_trace(dspark_steps())])
    assert found.step_ms == pytest.approx(0.3)
    assert found.num_steps == 12 - 1 - 4
    expected = {
        "dense GEMM": 120.0,
        "MLA/attention": 40.0,
        "router and glue": 8.0,
        "sampling": 5.0,
        "draft": 50.0,
        "idle in graph": 11.0 + 8.0,
        "host": 20.0 + 12.0 + 17.0,
        "idle between graphs": 3.0 + 3.0 + 3.0,
    }
    assert {n: v / MILLI for n, v in found.milliseconds.items() if v} == pytest.approx(expected)
    assert sum(found.milliseconds.values()) == pytest.approx(found.step_ms)
    assert found.idle_fraction == pytest.approx(77 / 300)
    assert found.kernels["draft"] == 9


def test_counts_of_a_known_step() -> None:
    facts = step_facts(make_trace(dspark_steps()))
    assert (facts.graphs, facts.small_graphs, facts.eager_kernels) == (2, 0, 1)
    assert facts.synchronizations == 1
    assert facts.overlapped_kernels == 0
    assert facts.step_ms == pytest.approx(0.3)


def test_time_that_profiling_added_is_taken_off_the_idle_time() -> None:
    found = census([make_trace(dspark_steps())])
    # 77 of 300 are idle; without 60 of them 17 of 240 are.
    assert found.calibrated_idle_fraction(0.24) == pytest.approx(17 / 240)
    assert found.calibrated_idle_fraction(0.2) == 0.0
    facts = step_facts(make_trace(dspark_steps()))
    assert census_to_dict(found, facts, 0.24)["idle_fraction"] == pytest.approx(17 / 240)
    assert census_to_dict(found, facts)["idle_fraction"] == pytest.approx(77 / 300)


def test_prefills_and_pauses_are_no_steps() -> None:
    steps = Steps()
    for number in range(12):
        steps.graph(TARGET)
        steps.idle(5000.0 if number == 6 else 21.0)
    found = census([make_trace(steps.events)])
    assert found.num_steps == 6
    assert found.step_ms == pytest.approx(0.2)


def test_a_draft_that_takes_longer_than_its_target_is_still_the_draft() -> None:
    steps = Steps()
    for _ in range(10):
        steps.graph(TARGET)
        steps.graph(DRAFT * 5)
        steps.idle(2.0)
    found = census([make_trace(steps.events)])
    assert found.milliseconds["draft"] / MILLI == pytest.approx(250.0)
    assert found.milliseconds["MLA/attention"] / MILLI == pytest.approx(40.0)


def test_a_graph_of_metadata_is_neither_target_nor_draft() -> None:
    steps = Steps()
    for _ in range(10):
        steps.graph((("page_table_kernel", 2.0),))
        steps.graph(TARGET)
    trace = make_trace(steps.events)
    assert step_facts(trace).small_graphs == 1
    assert "draft" not in census([trace]).milliseconds


def test_kernels_that_overlap_are_billed_once() -> None:
    steps = Steps()
    for _ in range(10):
        steps.graph(TARGET)
        # Begins before the last norm has ended, as with programmatic launch.
        steps.now -= 1.0
        steps.eager("silu_kernel", 5.0)
        steps.idle(10.0)
    trace = make_trace(steps.events)
    found = census([trace])
    assert sum(found.milliseconds.values()) == pytest.approx(found.step_ms)
    assert found.milliseconds["router and glue"] / MILLI == pytest.approx(8.0 + 4.0)
    assert step_facts(trace).overlapped_kernels == 1


def reducing(micros: list[float]) -> list[dict[str, object]]:
    steps = Steps()
    for duration in micros:
        steps.graph((*TARGET, ("cross_device_reduce_1stage", duration)), gap=0.0)
        steps.idle(4.0)
    return steps.events


def test_a_rank_that_waits_is_not_billed_for_work() -> None:
    late = make_trace(reducing([5.0] * 12), 1)
    early = make_trace(reducing([9.0] * 12), 0)
    alone = census([early])
    assert alone.milliseconds[ALL_REDUCE] / MILLI == pytest.approx(9.0)
    both = census([early, late])
    assert both.milliseconds[ALL_REDUCE] / MILLI == pytest.approx(5.0)
    assert both.milliseconds[RANK_WAIT] / MILLI == pytest.approx((4.0 + 0.0) / 2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...",
            "MLA/attention",
        ),
        ("nvjet_tst_64x8_64x16_1x1_h_bz_TNT", "dense GEMM"),
        ("skinny_linear_kernel", "dense GEMM"),
        ("decode_attention_kernel", "MLA/attention"),
        ("merge_attention_kernel", "MLA/attention"),
        ("fused_moe_kernel", "MoE GEMM"),
        ("moe_align_small_numel_kernel", "router and glue"),
        ("router_gate_matvec_kernel", "router and glue"),
        ("fused_kda_conv_gating_verify_kernel", "KDA"),
        ("_causal_conv1d_update_kernel", "KDA"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all-reduce"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel", "all-reduce"),
        ("_static_accept_tail_kernel", "sampling"),
        ("at::native::reduce_kernel<ArgMaxOps>", "sampling"),
        ("fused_add_rmsnorm_kernel", "router and glue"),
        ("Memcpy DtoD (Device -> Device)", "router and glue"),
        ("_fused_kv_norm_rope_write_kernel", "router and glue"),
        ("something_new", "other"),
    ],
)
def test_kernel_names(name: str, kind: str) -> None:
    assert kernel_class(name) == kind


def test_files_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "1.5-TP-3.trace.json.gz"
    with gzip.open(path, "wt") as stream:
        json.dump({"traceEvents": dspark_steps()}, stream)
    assert read_trace(path).rank == 3
    plain = tmp_path / "t.json"
    plain.write_text(json.dumps({"traceEvents": dspark_steps()}))
    assert read_trace(plain).rank == 0
    plain.write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(plain)


def test_what_is_no_trace_of_decoding_is_refused() -> None:
    with pytest.raises(ValueError, match="no work of a GPU"):
        make_trace([{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}])
    with pytest.raises(ValueError, match="more than 5"):
        census([make_trace(dspark_steps(3))])


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    found = census([make_trace(dspark_steps())])
    rows = census_rows(found)
    assert rows[1] == ["dense GEMM", "0.120", "40.0 %", "4.0"]
    assert rows[-1][:3] == ["step", "0.300", "100.0 %"]
    picture = census_svg(found, "a & b")
    assert "a &amp; b: 0.300 ms a step" in picture
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="56"', picture)]
    assert sum(widths) == pytest.approx(960.0, abs=0.1)
    write_picture(tmp_path / "c.html", found, "x")
    assert "<table>" in (tmp_path / "c.html").read_text()
    write_picture(tmp_path / "c.svg", found, "x")
    assert (tmp_path / "c.svg").read_text().startswith("<svg")
