"""Profiles hold what they promise, and nothing is started that could not serve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_contract import DRAFT, TARGET
from test_launch import sglang_folder

from serving.facts import Family, Gpu, gpu_of_capability, read_target, tensor_names
from serving.launch_spec import Launch, Setting, given
from serving.offline import OfflineSettings, offline_arguments
from serving.profiles import Profile, Request, build_launch, settings_for
from serving.surface import check_surface, known_arguments, known_environment

LING = {
    **TARGET,
    "architectures": ["BailingMoeV3ForCausalLM"],
    "moe_intermediate_size": 768,
    "num_nextn_predict_layers": 1,
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
HEAD = ("confidence_head.proj.weight", "confidence_head.proj.bias")


def folder(path: Path, config: dict[str, Any], tensors: tuple[str, ...] = HEAD) -> str:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(1) for name in tensors}, path / "model.safetensors")
    return str(path)


@pytest.fixture
def dense(tmp_path: Path) -> dict[str, str]:
    return {
        "target_path": folder(tmp_path / "target", TARGET, ()),
        "draft_path": folder(tmp_path / "draft", DRAFT),
    }


@pytest.fixture
def ling(tmp_path: Path) -> dict[str, str]:
    return {
        "target_path": folder(tmp_path / "ling", LING, ()),
        "draft_path": folder(tmp_path / "draft", DRAFT),
    }


def words(launch: Launch) -> str:
    return " ".join(launch.command()[3:])


def test_the_published_line_of_ling_on_four_blackwell_gpus(ling: dict[str, str]) -> None:
    request = Request(Profile.DSPARK_STATIC, **ling, gpu=Gpu.BLACKWELL, tp_size=4)
    launch = build_launch(request)
    assert words(launch) == (
        f"--model-path {ling['target_path']} --speculative-algorithm DSPARK "
        f"--speculative-draft-model-path {ling['draft_path']} --tp-size 4 "
        "--attention-backend trtllm_mla --flashinfer-allreduce-fusion-backend auto "
        "--disable-radix-cache"
    )
    assert launch.environment_dict() == {
        "SGLANG_OPT_FUSED_KDA_VERIFY": "1",
        "SGLANG_RAGGED_VERIFY_MODE": "static",
    }


def test_nextn_of_ling_on_four_blackwell_gpus(ling: dict[str, str]) -> None:
    request = Request(Profile.NEXTN, ling["target_path"], gpu=Gpu.BLACKWELL, tp_size=4)
    launch = build_launch(request)
    arguments = launch.argument_dict()
    assert arguments["speculative_num_steps"] == 5
    assert arguments["speculative_eagle_topk"] == 1
    assert arguments["speculative_num_draft_tokens"] == 6
    assert arguments["mem_fraction_static"] == 0.85
    assert "disable_radix_cache" not in arguments
    assert launch.environment_dict()["SGLANG_ENABLE_METADATA_GLUE_GRAPH"] == "1"


@pytest.mark.parametrize(
    ("family", "gpu", "backend"),
    [
        ("dense", Gpu.HOPPER, "fa3"),
        ("dense", Gpu.BLACKWELL, "trtllm_mha"),
        ("dense", Gpu.CPU, "torch_native"),
        ("dense", Gpu.OTHER, None),
        ("ling", Gpu.HOPPER, "fa3"),
        ("ling", Gpu.AMPERE, None),
    ],
)
def test_attention_by_target_and_gpu(
    family: str, gpu: Gpu, backend: str | None, dense: dict[str, str], tmp_path: Path
) -> None:
    path = folder(tmp_path / "x", LING, ()) if family == "ling" else dense["target_path"]
    target = read_target(path)
    launch = settings_for(Request(Profile.PLAIN, path, gpu=gpu), target)
    assert launch.argument_dict().get("attention_backend") == backend


def test_compact_has_no_fused_kda_verify_which_would_not_run(ling: dict[str, str]) -> None:
    launch = build_launch(Request(Profile.DSPARK_COMPACT, **ling, gpu=Gpu.HOPPER, tp_size=2))
    assert launch.environment_dict() == {"SGLANG_RAGGED_VERIFY_MODE": "compact"}
    assert launch.argument_dict()["flashinfer_allreduce_fusion_backend"] == "auto"


def test_one_gpu_has_no_all_reduce_to_fuse(ling: dict[str, str]) -> None:
    launch = build_launch(Request(Profile.DSPARK_STATIC, **ling, gpu=Gpu.HOPPER))
    assert "flashinfer_allreduce_fusion_backend" not in launch.argument_dict()


def refused(text: str, request: Request) -> None:
    with pytest.raises(ValueError, match=text):
        build_launch(request)


def test_fp8_blocks_are_not_cut(tmp_path: Path) -> None:
    path = folder(tmp_path / "t", {**LING, **FP8}, ())
    plain = {"profile": Profile.PLAIN, "target_path": path, "gpu": Gpu.BLACKWELL, "tp_size": 4}
    refused(r"768 split over 4 GPUs is 192 columns.*fp8 block of 128.*ep=4", Request(**plain))
    launch = build_launch(Request(**plain, ep_size=4))
    assert launch.argument_dict()["ep_size"] == 4
    # 768 over two GPUs is three whole blocks each.
    build_launch(Request(**{**plain, "tp_size": 2}))


def test_what_is_refused_before_a_start(dense: dict[str, str], tmp_path: Path) -> None:
    static = {"profile": Profile.DSPARK_STATIC, "gpu": Gpu.HOPPER}
    last = folder(tmp_path / "last", {**DRAFT, "target_layer_ids": [0, 7]})
    short = folder(tmp_path / "short", {**DRAFT, "max_position_embeddings": 1024})
    target = dense["target_path"]
    refused("cannot capture the last layer", Request(**static, target_path=target, draft_path=last))
    refused("is 1024; the target is", Request(**static, target_path=target, draft_path=short))
    refused("block_size=6 is above the trained 5", Request(**static, **dense, block_size=6))
    refused("no draft is named", Request(**static, target_path=target))
    refused("takes no draft", Request(Profile.PLAIN, **dense))
    refused("num_nextn_predict_layers is 0", Request(Profile.NEXTN, target))
    cpu = Request(Profile.DSPARK_STATIC, **dense, gpu=Gpu.CPU)
    refused("speculates on GPUs only", cpu)
    wrong = {"attention_backend": "trtllm_mla"}
    refused("no kernels for hopper", Request(**static, **dense, arguments=wrong))
    glue = {"SGLANG_ENABLE_METADATA_GLUE_GRAPH": 1}
    refused("switched off by SGLang", Request(**static, **dense, environment=glue))
    refused("has no effect", Request(**static, **dense, sps_table=__file__))
    assert (
        build_launch(Request(**static, **dense, block_size=5)).argument_dict()[
            "speculative_dspark_block_size"
        ]
        == 5
    )


def test_compact_needs_a_confidence_head_and_a_captured_verify(
    dense: dict[str, str], tmp_path: Path
) -> None:
    bare = folder(tmp_path / "bare", DRAFT, HEAD[:1])
    compact = {"profile": Profile.DSPARK_COMPACT, "gpu": Gpu.HOPPER}
    refused(
        "no confidence head",
        Request(**compact, target_path=dense["target_path"], draft_path=bare),
    )
    triton = {"attention_backend": "triton"}
    refused("verifies ragged windows eagerly", Request(**compact, **dense, arguments=triton))
    refused("is no file", Request(**compact, **dense, sts_path=str(tmp_path / "none.json")))
    (tmp_path / "cut.json").write_text("{")
    refused("is no JSON", Request(**compact, **dense, sps_table=str(tmp_path / "cut.json")))


def test_what_is_measured_to_pay_is_on_by_itself(dense: dict[str, str], tmp_path: Path) -> None:
    def own(profile: Profile = Profile.DSPARK_STATIC, **changed: Any) -> set[str]:
        asked = {**dense, "gpu": Gpu.HOPPER, "fold": ("auto",), "kernels": ("auto",), **changed}
        launch = build_launch(Request(profile, **asked))
        return {n for n in launch.environment_dict() if n.startswith("SPLITSERVE_")}

    both = {"SPLITSERVE_FOLD", "SPLITSERVE_KERNELS"}
    assert own() == both
    assert own(fold=()) == {"SPLITSERVE_KERNELS"} and own(kernels=()) == {"SPLITSERVE_FOLD"}
    assert own(arguments={"attention_backend": "fa3"}) == both
    assert own(target_path=folder(tmp_path / "ling", LING, ())) == both
    for changed in (
        {"gpu": Gpu.BLACKWELL},
        {"gpu": Gpu.AMPERE},
        {"tp_size": 2},
        {"arguments": {"attention_backend": "triton"}},
        {"profile": Profile.DSPARK_COMPACT},
        {"profile": Profile.PLAIN, "draft_path": ""},
        {"target_path": folder(tmp_path / "moe", {**TARGET, "architectures": ["Other"]}, ())},
    ):
        assert own(**changed) == set(), changed
    refused("need a GPU of Hopper", Request(Profile.DSPARK_STATIC, **dense, kernels=("all",)))


def test_kernels_of_our_own_are_asked_for_and_refused(
    dense: dict[str, str], tmp_path: Path
) -> None:
    static = {"profile": Profile.DSPARK_STATIC, "kernels": ("all",)}
    launch = build_launch(Request(**static, gpu=Gpu.HOPPER, **dense))
    assert launch.environment_dict()["SPLITSERVE_KERNELS"] == "all"
    refused("need a GPU of Hopper or later", Request(**static, gpu=Gpu.AMPERE, **dense))
    plain = {"profile": Profile.PLAIN, "target_path": dense["target_path"], "gpu": Gpu.HOPPER}
    for parts in (("attention",), ("markov", "rope"), ("norm",)):
        refused("no effect without a DSPARK profile", Request(**plain, kernels=parts))
    assert build_launch(Request(**plain, kernels=("linear",))).environment_dict()
    for other in ({"gpu": Gpu.BLACKWELL}, {"arguments": {"attention_backend": "triton"}}):
        asked = {**static, "gpu": Gpu.HOPPER, **other}
        refused("needs FlashAttention", Request(**asked, **dense))
        assert build_launch(Request(**{**asked, "kernels": ("linear",)}, **dense))
    broken = tmp_path / "choices.jsonl"
    broken.write_text("{}")
    choices = {"environment": {"SPLITSERVE_LINEAR_CHOICES": str(broken)}}
    refused("is no file of choices", Request(**static, gpu=Gpu.HOPPER, **dense, **choices))
    wrong = {**static, "kernels": ("moe",)}
    refused("kernels='moe' is not usable", Request(**wrong, gpu=Gpu.HOPPER, **dense))


def test_a_broken_weights_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x08\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        tensor_names(file)
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    whole = len(header).to_bytes(8, "little") + header + b"\0" * 4
    file.write_bytes(whole)
    assert tensor_names(file) == {"a"}
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"cut off: it has 65 of 66 bytes"):
        tensor_names(file)


def test_families_and_generations(tmp_path: Path) -> None:
    assert read_target("some/name").family is Family.OTHER
    assert read_target(folder(tmp_path / "a", TARGET, ())).family is Family.DENSE
    assert read_target(folder(tmp_path / "b", LING, ())).family is Family.LING3
    found = [gpu_of_capability(c) for c in ("8.0", "9.0", "10.3", "12.0", "")]
    assert found == [Gpu.AMPERE, Gpu.HOPPER, Gpu.BLACKWELL, Gpu.OTHER, Gpu.OTHER]


def test_a_hub_name_is_known_by_what_this_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder(tmp_path / "snapshot", LING, ())
    found: dict[str, Any] = {"some/ling": str(tmp_path / "snapshot" / "config.json")}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda name, file: found.get(name)
    )
    assert read_target("some/ling").family is Family.LING3
    assert read_target("some/other").config is None
    monkeypatch.undo()
    assert read_target("no folder, no name").config is None


def test_a_line_can_be_pasted_and_later_settings_win() -> None:
    launch = Launch("plain", (Setting("model_path", "a b", ""), Setting("sleep", True, "")))
    launch = launch.plus([Setting("sleep", False, "")], given({"X": True, "Y": "1 2"}))
    assert launch.line() == "X=1 Y='1 2' python -m sglang.launch_server --model-path 'a b'"
    assert launch.plus(given({"bs": [1, 2]})).command()[-3:] == ["--bs", "1", "2"]
    with pytest.raises(ValueError, match="x=None is not usable"):
        given({"x": None})


def test_engines_that_measure_are_built_by_the_same_profiles(dense: dict[str, str]) -> None:
    arguments = offline_arguments(OfflineSettings(**dense, context_length=1024))
    assert arguments["speculative_algorithm"] == "DSPARK"
    assert arguments["disable_radix_cache"] is True
    assert arguments["cuda_graph_bs_decode"] == [1, 2, 4, 8, 16, 32, 64]
    assert arguments["context_length"] == 1024
    assert "attention_backend" not in arguments
    plain = OfflineSettings(dense["target_path"], attention_backend="fa3")
    assert offline_arguments(plain)["attention_backend"] == "fa3"
    assert "speculative_algorithm" not in offline_arguments(plain)


# --- against the installed SGLang ----------------------------------------------------------------


def test_every_profile_names_only_what_the_installed_sglang_has(
    dense: dict[str, str], tmp_path: Path
) -> None:
    root = sglang_folder()
    path = folder(tmp_path / "l", LING, ())
    for profile in Profile:
        for gpu in Gpu:
            for target in (dense["target_path"], path):
                request = Request(
                    profile, target, dense["draft_path"], gpu, 4, 4, 3, 100, "sps", "sts"
                )
                check_surface(settings_for(request, read_target(target)), root)


def test_an_unknown_argument_or_variable_is_refused(dense: dict[str, str]) -> None:
    root = sglang_folder()
    base = Launch("plain", ())
    with pytest.raises(ValueError, match="did you mean attention_backend"):
        check_surface(base.plus(given({"attention_backendd": "fa3"})), root)
    # A resolved field that has no flag.
    with pytest.raises(ValueError, match="no argument watermark_key"):
        check_surface(base.plus(given({"watermark_key": "x"})), root)
    with pytest.raises(ValueError, match="SGLANG_ENABLE_FUSED_VERIFY_EXTEND_GRAPH"):
        check_surface(base.plus((), given({"SGLANG_ENABLE_FUSED_VERIFY_EXTEND_GRAPH": True})), root)
    check_surface(base.plus((), given({"SPLITSERVE_FOLD": "accept", "HF_HOME": "x"})), root)


def test_what_is_read_from_the_sources_is_what_its_parser_takes() -> None:
    root = sglang_folder()
    program = (
        "import argparse, json; from sglang.srt.server_args import ServerArgs;"
        "p = argparse.ArgumentParser(add_help=False); ServerArgs.add_cli_args(p);"
        "from sglang.srt.environ import envs;"
        "print('@' + json.dumps([sorted({s[2:].replace('-', '_') for a in p._actions"
        " for s in a.option_strings if s.startswith('--')}),"
        " [n for n in dir(type(envs)) if n.startswith('SGLANG_')]]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("@")]
    flags, variables = json.loads(lines[0][1:])
    assert known_arguments(root) <= set(flags)
    assert len(known_arguments(root)) > 500
    assert set(variables) <= known_environment(root)
