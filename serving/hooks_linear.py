"""A decode step's linear products by kernels of our own, where they are faster on this GPU.

SGLang's unquantized layers, and both ways to the lm_head, go through `Products` (`linear`), the
first product of a dense MLP with the activation behind it (`mlp`), and a Markov head's product with
its second matrix, one for each drafted token (`markov`). `norm` takes a layer's products where a
norm is part of them (`serving.hooks_norm`). It takes products of up to 16 rows with bfloat16 or
float16 weights; a larger batch, a quantized layer, an lm_head with LoRA or float32 logits, and
anything under torch.compile or batch-invariant operators stays SGLang's. A layer's own LoRA is
added to its base product, which may be ours.

SGLang runs a graph's body twice before it captures it. At the first product of a shape in there,
candidates and SGLang's own product are timed on that weight, and the shape keeps the fastest; in a
capture nothing is timed or compiled. Timings vary, and other kernels round otherwise: where answers
must repeat byte by byte, SPLITSERVE_LINEAR_CHOICES names a file. Choices in it are taken as they
are, what is missing is timed and added, so a second start repeats the first.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from serving.hooks_kernels import CHOICES, LOG_MARK
from serving.hooks_norm import SAVES, Behind, Mark, Norms

APPLY = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
DRAFT_HEAD = "sglang.srt.models.dspark.project_through_lm_head"
MAX_ROWS = 16
DTYPES = (torch.bfloat16, torch.float16)
PLAIN_METHODS = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
"""Of an lm_head whose product SGLang computes with its plain weight."""
LIBRARY = "library"

logger = logging.getLogger("serving.kernels")


MLPS = {
    "sglang.srt.models.qwen2.Qwen2MLP.forward": ("forward_batch",),
    "sglang.srt.models.llama.LlamaMLP.forward": (),
    "sglang.srt.models.dflash.DFlashMLP.forward": (),
}
"""Of Qwen and Llama targets and of drafts, with the keywords that the second product takes."""
MARKOV = "sglang.srt.models.dspark.VanillaMarkov.project_bias"


class Shape(NamedTuple):
    """What shares a choice."""

    num_out: int
    num_in: int
    rows: int
    """The bucket: 8 or 16."""
    dtype: str
    bias: bool
    gated: bool = False
    """Whether silu(gate) * up follows in the same kernel."""
    norm: str = ""
    """"before" or "behind" where that norm is part of the kernel."""

    def __str__(self) -> str:
        more = " with bias" * self.bias + " with gate" * self.gated
        more += f" with the norm {self.norm}" if self.norm else ""
        return f"{self.num_out}x{self.num_in} up to {self.rows} rows {self.dtype}{more}"


class KeptChoices:
    """A file of choices, one JSON object a line; the first line of a shape counts.

    Ranks of a server write into one file: each adds its choice and takes what then comes first.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises ValueError for a file that cannot be read or holds something else."""
        self.path = path
        self.names = self.read()

    def read(self) -> dict[Shape, str]:
        if self.path is None or not self.path.exists():
            return {}
        names: dict[Shape, str] = {}
        try:
            for line in self.path.read_text().splitlines():
                found = json.loads(line)
                name = found.pop("choice")
                if not isinstance(name, str):
                    raise TypeError(f"choice {name!r}")
                names.setdefault(Shape(**found), name)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{CHOICES}={self.path} is no file of choices ({error}); allowed: one that a "
                "server wrote, and one that does not exist yet; remove it or name another"
            ) from error
        return names

    def keep(self, shape: Shape, name: str) -> str:
        """Add a choice; gives the one that counts."""
        if self.path is None:
            return name
        # One short write in append mode is not torn by another process's.
        with self.path.open("a") as file:
            file.write(json.dumps({**shape._asdict(), "choice": name}) + "\n")
        self.names = self.read()
        return self.names[shape]


@dataclass
class Plan:
    """How a shape is computed."""

    config: Any = None
    """None: SGLang's product, for good."""
    counters: dict[int, Any] = field(default_factory=dict)
    """By a weight's address: two weights may be multiplied at once, one weight not."""


def register(register_hook: Callable[..., None], kind: Any, parts: Iterable[str]) -> None:
    """Hook the products of these parts. Raises ValueError for a bad file."""
    parts = frozenset(parts)
    path = os.environ.get(CHOICES)
    products = Products(KeptChoices(Path(path) if path else None), parts)
    if parts & {"linear", "norm"}:
        register_hook(APPLY, products.linear, kind.AROUND)
    if "linear" in parts:
        register_hook(HEAD, products.head, kind.AROUND)
        register_hook(DRAFT_HEAD, products.draft_head, kind.AROUND)
    if parts & {"mlp", "norm"}:
        for target, keywords in MLPS.items():
            register_hook(target, partial(products.mlp, keywords), kind.AROUND)
    if "markov" in parts:
        register_hook(MARKOV, products.markov, kind.AROUND)
    if "norm" in parts:
        products.norms.register(register_hook, kind)


class Products:
    """The hooks' state in one scheduler process."""

    def __init__(self, kept: KeptChoices, parts: Iterable[str] = ("linear", "mlp")) -> None:
        self.kept = kept
        self.parts = frozenset(parts)
        self.norms = Norms()
        self.plans: dict[Shape, Plan] = {}
        self.kernels: Any = None
        self.choice: Any = None

    def linear(
        self, original: Callable[..., Any], method: Any, layer: Any, x: Any, bias: Any = None
    ) -> Any:
        """Instead of UnquantizedLinearMethod.apply."""
        # The first is a constant while torch.compile traces, which must not guard on x's shape.
        if torch.compiler.is_compiling() or x.shape[0] > MAX_ROWS:
            return original(method, layer, x, bias)

        def library(x: Any) -> Any:
            return original(method, layer, x, bias)

        mark, behind = self.norms.mark_of(x), self.norms.behind(layer, x.shape[0])
        if mark is not None or behind is not None or "linear" in self.parts:
            y = self.product(layer.weight, x, bias, library, mark=mark, behind=behind)
            if y is not None:
                return y
        return library(self.norms.result(x, mark))

    def head(
        self,
        original: Callable[..., Any],
        processor: Any,
        hidden_states: Any,
        lm_head: Any,
        embedding_bias: Any = None,
        *,
        out: Any = None,
    ) -> Any:
        """Instead of LogitsProcessor._compute_lm_head, which adds no bias to a plain weight."""

        def library(x: Any) -> Any:
            return original(processor, x, lm_head, embedding_bias)

        if (
            not torch.compiler.is_compiling()
            and hidden_states.shape[0] <= MAX_ROWS
            and is_plain_head(lm_head)
            # A processor without these is one that we do not know.
            and not getattr(processor, "use_fp32_lm_head", True)
            and not getattr(processor, "use_fp32_lm_head_output", True)
            and getattr(processor, "rl_on_policy_target", "unknown") is None
        ):
            y = self.product(lm_head.weight, hidden_states, None, library)
            if y is not None:
                return y
        return original(processor, hidden_states, lm_head, embedding_bias, out=out)

    def draft_head(self, original: Callable[..., Any], hidden: Any, lm_head: Any) -> Any:
        """Instead of a DSpark draft's product with the target's lm_head."""
        if (
            not torch.compiler.is_compiling()
            and hidden.shape[0] <= MAX_ROWS
            and is_plain_head(lm_head)
        ):
            y = self.product(lm_head.weight, hidden, None, lambda x: original(x, lm_head))
            if y is not None:
                return y
        return original(hidden, lm_head)

    def mlp(
        self,
        passed: tuple[str, ...],
        original: Callable[..., Any],
        module: Any,
        x: Any,
        forward_batch: Any = None,
    ) -> Any:
        """Instead of a dense MLP's forward: the activation is part of the first product."""
        given = () if forward_batch is None else (forward_batch,)
        mark = self.norms.mark_of(x)
        if (
            (mark is not None or "mlp" in self.parts)
            and not torch.compiler.is_compiling()
            # A quantized layer may be given values and scales.
            and isinstance(x, torch.Tensor)
            and x.dim() == 2
            and x.shape[0] <= MAX_ROWS
            and is_gated_mlp(module, x)
        ):
            y = self.product(
                *(module.gate_up_proj.weight, x, None),
                lambda x: module.act_fn(module.gate_up_proj(x)[0]),
                gated=True,
                mark=mark,
            )
            if y is not None:
                keywords = {"forward_batch": forward_batch} if "forward_batch" in passed else {}
                return module.down_proj(y, **keywords)[0]
        return original(module, self.norms.result(x, mark), *given)

    def markov(self, original: Callable[..., Any], head: Any, latent: Any) -> Any:
        """Instead of a Markov head's product with its second matrix."""
        w2 = head.markov_w2
        if (
            not torch.compiler.is_compiling()
            and latent.shape[0] <= MAX_ROWS
            and type(w2) is torch.nn.Linear
            and not (w2.weight.requires_grad and torch.is_grad_enabled())
        ):
            y = self.product(w2.weight.detach(), latent, w2.bias, lambda x: original(head, x))
            if y is not None:
                return y
        return original(head, latent)

    def product(
        self,
        weight: Any,
        x: Any,
        bias: Any,
        library: Callable[[Any], Any],
        gated: bool = False,
        mark: Mark | None = None,
        behind: Behind | None = None,
    ) -> torch.Tensor | None:
        """The product by a kernel, with the norms that are part of it; None for SGLang's."""
        if not is_served(weight, x):
            return None
        rows = 8 if x.shape[0] <= 8 else MAX_ROWS
        dtype = str(x.dtype).removeprefix("torch.")
        norm = "before" if mark is not None else "behind" if behind is not None else ""
        shape = Shape(weight.shape[0], weight.shape[1], rows, dtype, bias is not None, gated, norm)
        plan = self.plans.get(shape)
        try:
            if plan is None:
                if is_capturing():
                    return None
                plan = self.plans[shape] = Plan()
                self.decide(plan, shape, weight, bias, library)
            if plan.config is None:
                return None
            return self.run(plan, weight, x, bias, gated, mark, behind)
        except Exception as error:
            # Serving goes on whatever a kernel, a driver or the file does.
            self.plans[shape] = Plan()
            logger.warning("%s%s stays SGLang's: %r", LOG_MARK, shape, error)
            return None

    def decide(
        self, plan: Plan, shape: Shape, weight: Any, bias: Any, library: Callable[[Any], Any]
    ) -> None:
        """Fill in a shape's plan, from the file or by timing."""
        if is_batch_invariant():
            logger.warning("%s%s stays SGLang's: batch-invariant operators", LOG_MARK, shape)
            return
        if self.kernels is None:
            from serving.kernels import linear_choice, skinny_linear

            self.kernels, self.choice = skinny_linear, linear_choice
        name = self.kept.names.get(shape)
        if name is None:
            found = self.choice.choose(
                *(weight, shape.rows),
                library=library,
                bias=bias,
                gated=shape.gated,
                saves=SAVES if shape.norm else 0.0,
                in_layer=bool(shape.norm),
            )
            for failed, why in found.failed.items():
                logger.warning("%s%s: %s is left out: %s", LOG_MARK, shape, failed, why)
            name = self.kept.keep(shape, found.name)
            # The choice and the fastest of the other side.
            times = found.microseconds
            others = [key for key in times if (key == LIBRARY) != (found.name == LIBRARY)]
            named = [found.fastest, *sorted(others, key=times.__getitem__)[:1]]
            told = ", ".join(f"{key} {times[key]:.1f} us" for key in named)
            if found.name != found.fastest:
                told += f", as {found.name}"
            if name != found.name:
                told = f"{name}, as kept by another rank"
        else:
            told = f"{name}, from {self.kept.path}"
        if name != LIBRARY:
            plan.config = self.kernels.Config.parse(name)
        logger.warning("%s%s: %s", LOG_MARK, shape, told)

    def run(
        self,
        plan: Plan,
        weight: Any,
        x: Any,
        bias: Any,
        gated: bool,
        mark: Mark | None,
        behind: Behind | None,
    ) -> torch.Tensor | None:
        """The kernel; None where this one call cannot use it."""
        add, normed = None, None if mark is None else mark.normed
        if behind is not None:
            norm = behind.norm
            add = self.kernels.Add(behind.residual, norm.weight.data, norm.variance_epsilon)
        if self.kernels.why_not(x, weight, bias, gated, normed=normed, add=add):
            return None
        counters, place = None, weight.data_ptr()
        if plan.config.split_k > 1:
            counters = plan.counters.get(place)
            if counters is None:
                # Memory of a capture belongs to its graph, and would be set to 0 by it alone.
                if is_capturing():
                    return None
                counters = plan.counters[place] = self.kernels.make_counters(weight, plan.config)
        y: torch.Tensor
        if behind is not None:
            y, made = self.kernels.add_linear(
                x, weight, bias, add=add, config=plan.config, counters=counters
            )
            self.norms.mark(y, made, behind)
            return y
        y = self.kernels.skinny_linear(
            *(x, weight, bias),
            config=plan.config,
            counters=counters,
            gated=gated,
            normed=normed,
        )
        if mark is not None:
            mark.used = True
        return y


def is_served(weight: Any, x: Any) -> bool:
    """Whether a product is of the kind that is looked at at all."""
    return (
        x.dim() == 2
        and x.shape[0] > 0
        and x.dtype in DTYPES
        and weight.dtype == x.dtype
        # A quantized tensor can call itself bfloat16, and is of a class of its own.
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.dim() == 2
        and weight.shape[1] == x.shape[1]
        and not weight.requires_grad
        and is_on_gpu(x)
        and weight.device == x.device
    )


def is_plain_head(lm_head: Any) -> bool:
    """Whether SGLang would multiply with the lm_head's weight as it is."""
    method = getattr(lm_head, "quant_method", None)
    return (
        hasattr(lm_head, "weight")
        and not hasattr(lm_head, "set_lora")
        and (method is None or type(method).__name__ in PLAIN_METHODS)
    )


def is_gated_mlp(module: Any, x: Any) -> bool:
    """Whether SGLang's MLP would multiply, apply silu, and multiply, and nothing else."""
    first = module.gate_up_proj
    dual = getattr(module, "dual_gemm", None)
    return (
        # One with LoRA is of another class.
        type(first).__name__ == "MergedColumnParallelLinear"
        and type(first.quant_method).__name__ == "UnquantizedLinearMethod"
        and type(module.act_fn).__name__ == "SiluAndMul"
        and first.bias is None
        and not first.gather_output
        and len(set(first.output_partition_sizes)) == 1
        and len(first.output_partition_sizes) == 2
        and not is_sequence_parallel()
        and not (dual is not None and dual.can_run(x, first))
    )


def is_sequence_parallel() -> bool:
    """Whether a product gathers its rows from other ranks first."""
    from sglang.srt.runtime_context import get_forward

    return bool(get_forward().sp_active)


def is_on_gpu(x: Any) -> bool:
    return bool(x.is_cuda)


def is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def is_batch_invariant() -> bool:
    """Whether SGLang promises results that do not depend on the batch."""
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    return bool(is_batch_invariant_mode_enabled())
