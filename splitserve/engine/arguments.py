"""How SGLang is started: its arguments, and what its processes find in their environment."""

from __future__ import annotations

import os
from typing import Any

from serving.ports import free_port
from splitserve.engine.base import EngineSpec
from splitserve.engine.draft_loader import LOADER
from splitserve.engine.plugin import ENVIRONMENT, CaptureConfig
from splitserve.target.info import capture_convention
from splitserve.transport.layout import RingAddress

# SGLang keeps a few tokens of the context back; a sample as long as ours must still fit.
CONTEXT_MARGIN_TOKENS = 16
MAIN_RING, PROBE_RING = "main", "probe"


def engine_arguments(spec: EngineSpec, architecture: str) -> dict[str, Any]:
    """SGLang's own arguments: an engine that captures, and speculates if it has a draft."""
    context_length = spec.context_length + CONTEXT_MARGIN_TOKENS
    tokens = spec.kv_cache_tokens or spec.max_running_requests * context_length
    arguments: dict[str, Any] = {
        "model_path": spec.target_path,
        "dtype": spec.dtype,
        "device": spec.device,
        "tp_size": spec.tp_size,
        "context_length": context_length,
        "chunked_prefill_size": spec.chunked_prefill_size,
        "max_prefill_tokens": max(spec.chunked_prefill_size, context_length),
        "max_running_requests": spec.max_running_requests,
        "max_total_tokens": tokens,
        "enable_mixed_chunk": spec.mixed_chunk,
        # A cached prefix would be missing from the capture.
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "sleep_on_idle": True,
        "port": spec.port or free_port(),
        "log_level": "warning",
    }
    return arguments | _capture_arguments(spec, architecture) | _device_arguments(spec)


def _capture_arguments(spec: EngineSpec, architecture: str) -> dict[str, Any]:
    if spec.draft_path:
        # The draft names the layers, and its states are captured on the way.
        return {
            "speculative_algorithm": "DSPARK",
            "speculative_draft_model_path": spec.draft_path,
            "custom_weight_loader": [LOADER],
        }
    return {
        # Only names the convention of the layer ids; SGLang resets it.
        "speculative_algorithm": convention(spec, architecture),
        "enable_return_aux_hidden_states": True,
        "return_aux_hidden_state_layer_ids": list(spec.layer_ids),
    }


def _device_arguments(spec: EngineSpec) -> dict[str, Any]:
    if spec.device == "cpu":
        return {
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
            # One process prefills thousands of tokens on a few cores: slow is not stuck.
            "watchdog_timeout": 3600,
        }
    sizes = spec.cuda_graph_batch_sizes or graph_batch_sizes(spec.max_running_requests)
    arguments: dict[str, Any] = {
        # A prefill's graphs would take minutes to capture and keep the hook from its states.
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": list(sizes),
    }
    if spec.attention_backend:
        arguments["attention_backend"] = spec.attention_backend
    if spec.memory_fraction:
        arguments["mem_fraction_static"] = spec.memory_fraction
    return arguments


def graph_batch_sizes(max_running_requests: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every further 8 up to 32, every 32 beyond, and the largest one."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(64, max_running_requests, 32)]
    return (*[size for size in sizes if size < max_running_requests], max_running_requests)


def convention(spec: EngineSpec, architecture: str) -> str:
    """The name under which SGLang captures this target's layers."""
    return capture_convention(architecture) if spec.capture == "auto" else spec.capture


def environment(spec: EngineSpec, probe: RingAddress, control_path: str) -> dict[str, str]:
    """What the plugin in SGLang's processes works with, and settings that have no argument."""
    capture = CaptureConfig(
        rings={MAIN_RING: spec.ring.to_json(), PROBE_RING: probe.to_json()},
        device=spec.device,
        control=control_path,
        exchange=spec.exchange.to_json() if spec.exchange else "",
        speculates=bool(spec.draft_path),
        prefill_together=spec.prefill_together,
    )
    variables = {ENVIRONMENT: capture.to_json(), "TOKENIZERS_PARALLELISM": "false"}
    # The margin may exceed what the target was made for; no sample does.
    variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if spec.device == "cpu":
        variables["OMP_NUM_THREADS"] = str(spec.num_threads or len(os.sched_getaffinity(0)))
    return variables
