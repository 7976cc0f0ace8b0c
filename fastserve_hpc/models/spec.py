"""What a model is, as plain numbers: read from its files, used by every part that builds or limits something."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastserve_hpc.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding: rotation frequencies theta^(-2i/head_dim), then scaled.

    `linear` divides every frequency by `factor`. `llama3` does so only for wavelengths past
    original_max_position / low_freq_factor, keeps those under original_max_position / high_freq_factor,
    and blends in between.
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


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
    rope: RopeSpec
    tie_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str | None = None
    """What the files hold, as a torch name ("bfloat16"); None where they do not say or are quantised."""
    eos_token_ids: tuple[int, ...] = ()

    def check(self, place: str) -> None:
        """Raise `ModelError` naming `place` where the head counts and sizes contradict each other."""
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{place}: {self.num_heads} heads are not a multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"{place}: the head size {self.head_dim} is odd, so its dimensions cannot be paired")

    def check_tp(self, tp_size: int) -> None:
        """Raise `ModelError` with the sizes that work, unless `tp_size` ranks can share the attention heads."""
        if tp_size not in (sizes := self.tp_sizes()):
            raise ModelError(
                f"--tp {tp_size} cannot share out the {self.num_heads} heads and {self.num_kv_heads} KV heads of "
                f"{self.name}: use one of {', '.join(map(str, sizes))}"
            )

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
