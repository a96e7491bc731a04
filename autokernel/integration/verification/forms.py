"""Ways to deploy a model, by what runs the parts for which there are no kernels, and the code that does it."""

from dataclasses import dataclass

# PyTorch as it is, torch.compile, and its modes.
EAGER, INDUCTOR, GRAPHS, AUTOTUNED = "eager", "inductor", "reduce-overhead", "max-autotune"


@dataclass(frozen=True)
class Form:
    """The model over EAGER, INDUCTOR, …, with kernels or without; the default is the model as it is, untouched."""

    fallback: str = EAGER
    kernels: bool = False

    @property
    def name(self) -> str:
        return ours(self.fallback) if self.kernels else baseline(self.fallback)

    def code(self, run: str | None, module: str = "autokernel") -> str:
        """What a program says to get it, with the kernels of `run`, or of a package; empty for the model as it is."""
        if self.kernels:
            given = f', "{run}"' if run else ""
            fallback = "" if self.fallback == EAGER else f', fallback="{self.fallback}"'
            return f"{module}.apply(model{given}{fallback})"
        return "" if self.fallback == EAGER else f"model = {_compile('model', self.fallback)}"

    @property
    def call(self) -> str:
        """Of torch.compile, as one speaks of it."""
        return _compile("", self.fallback)


def baseline(fallback: str) -> str:
    """The name of the model without kernels."""
    return {EAGER: EAGER, INDUCTOR: "torch.compile"}.get(fallback, f"torch.compile {fallback}")


def ours(fallback: str) -> str:
    return f"kernels over {fallback}"


def _compile(model: str, fallback: str) -> str:
    mode = "" if fallback == INDUCTOR else f'mode="{fallback}"'
    return f"torch.compile({', '.join(filter(None, (model, mode)))})"
