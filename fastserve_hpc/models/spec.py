"""What a model is, as plain numbers: read from its files, used by every part that builds or limits something."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastserve_hpc.errors import ConfigError, ModelError

MLPActivation = Literal["silu_mul", "gelu_tanh_mul", "relu"]
"""Between the MLP's linears. The _mul ones gate: they act on one half of the outputs, which multiplies the other."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: rotation frequencies theta^(-2i/head_dim), then scaled.

    `linear` divides every frequency by `factor`. `llama3` does so only for wavelengths past
    original_max_position / low_freq_factor, keeps those under original_max_position / high_freq_factor,
    and blends in between. `yarn` keeps what turns round more than `beta_fast` times within original_max_position,
    divides what does so less than `beta_slow` times, blends by dimension in between (whole ones where it truncates),
    and multiplies cosine and sine by `attention_factor`.
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model. Counts are of the whole model, not of a rank's part."""

    name: str
    architecture: str
    """Key of `families.FAMILIES`."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    """Positions the model was trained for; the longest prompt + answer."""
    norm_eps: float
    rope: RopeSpec | None
    """None: positions are learned, and added to the embedding."""
    tie_embeddings: bool
    local_rope: RopeSpec | None = None
    """Of layers with a window, where it is not `rope`."""
    windows: tuple[int, ...] = ()
    """How many tokens each layer sees, itself included; 0 is all. Empty: all layers see all."""
    attention_scale: float | None = None
    """What multiplies attention scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Scores become cap * tanh(score / cap); 0: as they are."""
    logit_softcap: float = 0.0
    attention_bias: bool = False
    """Of query, key and value."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    activation: MLPActivation = "silu_mul"
    norm_first: bool = True
    """Norms stand before attention and MLP; else behind, on the sum with the residual stream."""
    final_norm: bool = True
    embedding_size: int | None = None
    """Of the embedding and the head, where it is not hidden_size."""
    dtype: str | None = None
    """What the files hold, as a torch name ("bfloat16"); None where they do not say or are quantised."""
    eos_token_ids: tuple[int, ...] = ()

    def check(self, place: str) -> None:
        """Raise `ModelError` naming `place` where the head counts and sizes contradict each other."""
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{place}: {self.num_heads} heads are not a multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2 and self.rope is not None:
            raise ModelError(f"{place}: the head size {self.head_dim} is odd, so its dimensions cannot be paired")

    def check_tp(self, tp_size: int) -> None:
        """Raise `ModelError` with the sizes that work, unless `tp_size` ranks can share the attention heads."""
        if tp_size not in (sizes := self.tp_sizes()):
            raise ModelError(
                f"--tp {tp_size} cannot share out the {self.num_heads} heads and {self.num_kv_heads} KV heads of "
                f"{self.name}: use one of {', '.join(map(str, sizes))}"
            )

    @property
    def scale(self) -> float:
        """What multiplies attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def is_gated(self) -> bool:
        """The MLP has three matrices, not two."""
        return self.activation.endswith("_mul")

    @property
    def vocab_width(self) -> int:
        """Numbers in a row of the embedding."""
        return self.embedding_size or self.hidden_size

    def window(self, layer: int) -> int:
        """How many tokens a layer sees, itself included; 0 is all."""
        return self.windows[layer] if self.windows else 0

    def longest(self, asked: int | None) -> int:
        """The longest prompt + answer: `asked` (--max-model-len), or all positions. Raises `ConfigError` for more."""
        if asked is not None and asked > self.max_position:
            raise ConfigError(
                f"--max-model-len {asked}: {self.name} was trained for {self.max_position} positions; "
                "ask for at most that"
            )
        return asked or self.max_position

    def tp_sizes(self) -> list[int]:
        """Every rank gets the same number of heads, and whole KV heads or one that it shares with its neighbours."""
        return [
            n
            for n in range(1, self.num_heads + 1)
            if self.num_heads % n == 0 and (self.num_kv_heads % n == 0 or n % self.num_kv_heads == 0)
        ]


def load_spec(path: Path) -> ModelSpec:
    """The spec of a Hugging Face directory or a .gguf file, without reading weights.

    Raises `ModelError` naming file and key for a missing or broken entry, an unknown architecture or rope type.
    """
    # Imported here: both build ModelSpecs.
    from fastserve_hpc.models import spec_gguf, spec_hf

    if path.is_dir():
        return spec_hf.read(path)
    if path.suffix == ".gguf":
        return spec_gguf.read(path)
    raise ModelError(f"{path} is neither a model directory nor a .gguf file")
