"""kvstrata: a KV-cache engine for transformer inference.

from kvstrata import LLM, SamplingParams

llm = LLM()
print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

from typing import TYPE_CHECKING, Any

from kvstrata.config import EngineConfig, RequestOptions, SamplingParams

if TYPE_CHECKING:
    from kvstrata.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "RequestOptions", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, only once it is asked for: `--help` must not wait for them."""
    if name == "LLM":
        from kvstrata.engine.llm import LLM  # noqa: PLC0415

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
