"""What a server has counted during a load, in words."""

from __future__ import annotations

from collections.abc import Mapping


def counted_parts(counted: Mapping[str, float | None], prompt_tokens: int | None = None) -> list[str]:
    """Of `EngineStatus.counted_since` what is not 0; `prompt_tokens` are those of the load, where they are known."""
    of_all = "" if prompt_tokens is None else f"of {prompt_tokens} "
    words = {
        "prefix_tokens": f"{{:.0f}} {of_all}prompt tokens from the prefix cache",
        "preemptions": "{:.0f} preemptions",
        "recomputed_tokens": "{:.0f} tokens computed again",
        "offloaded_bytes": "{:.1f} MB of KV offloaded",
        "uploaded_bytes": "{:.1f} MB of KV uploaded",
        "energy_j": "{:.1f} kJ",
    }
    units = {"offloaded_bytes": 1e6, "uploaded_bytes": 1e6, "energy_j": 1e3}
    return [text.format(count / units.get(name, 1)) for name, text in words.items() if (count := counted.get(name))]
