"""Which activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag
from megatron.config.rules import at_least, changed, raise_if, shown

MODULES = ("core_attn", "mlp")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    recompute_granularity: str | None = flag(None, choices=("full", "selective"))
    """full: keep only the input of layers; selective: keep all but what the modules of --recompute-modules compute.
    None: keep everything."""
    recompute_activations: bool = flag(False)
    """Short for --recompute-granularity selective."""
    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """With full granularity. uniform: keep the input of every --recompute-num-layers layers; block: only the first
    --recompute-num-layers layers of each (virtual) stage keep no more than their input."""
    recompute_num_layers: int | None = flag(None)
    """Layers of a group (uniform) or of a stage (block). Required with full granularity."""
    recompute_modules: tuple[str, ...] | None = flag(None, nargs="+")
    """With selective granularity: core_attn (scores and their product with the values) and mlp. None: core_attn."""

    def __post_init__(self) -> None:
        raise_if(self.problems())

    @property
    def granularity(self) -> str | None:
        """full, selective or None, by whichever of the two flags says so."""
        return "selective" if self.recompute_activations else self.recompute_granularity

    def recomputes(self, module: str) -> bool:
        """Whether `module` of every layer is recomputed by itself."""
        return self.granularity == "selective" and module in (self.recompute_modules or ("core_attn",))

    def problems(self) -> list[str]:
        """What is wrong with this concern by itself, a line each."""
        lines = at_least(self, 1, "recompute_num_layers")
        if self.recompute_activations and self.recompute_granularity == "full":
            lines.append(
                "--recompute-activations and --recompute-granularity full: the first means selective; keep one of them"
            )
        elif self.granularity == "full":
            if self.recompute_method is None:
                lines.append("--recompute-granularity full needs --recompute-method; use uniform or block")
            if self.recompute_num_layers is None:
                lines.append("--recompute-granularity full needs --recompute-num-layers; 1 keeps least at a time")
        else:
            lines += [
                f"{shown(self, name)} would be ignored without --recompute-granularity full; add that or drop it"
                for name in changed(self, "recompute_method", "recompute_num_layers")
            ]
        if self.recompute_modules is not None and self.granularity != "selective":
            lines.append(
                f"{shown(self, 'recompute_modules')} would be ignored without --recompute-granularity selective; add "
                "that or drop it"
            )
        lines += [
            f"--recompute-modules {name} is not supported; use {' and '.join(MODULES)}"
            for name in self.recompute_modules or ()
            if name not in MODULES
        ]
        return lines
