"""The text of one answer as its tokens come: whole characters only, and never past a stop text."""

from __future__ import annotations

from kvstrata.config import SamplingParams
from kvstrata.models.streaming import IncrementalDecoder, StopMatcher
from kvstrata.models.tokenizer import Tokenizer


class AnswerText:
    """Decodes tokens to text that is final, and watches for stop texts."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop_strings, params.include_stop_str_in_output)
        self.text = ""

    def push(self, token: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a token; returns the text that is now final, and the stop text that was completed, if any.

        may_stop: False while the answer has not reached min_tokens; stop texts are not looked for then.
        """
        piece = self._decoder.push((token,))
        emitted, stopped = self._matcher.push(piece) if may_stop else (piece, None)
        self.text += emitted
        return emitted, stopped

    def finish(self) -> tuple[str, str | None]:
        """Flush what was held back at the end of the answer; a stop text may still complete."""
        piece = self._decoder.finish()
        emitted, stopped = self._matcher.push(piece) if piece else ("", None)
        if stopped is None:
            emitted += self._matcher.finish()
        self.text += emitted
        return emitted, stopped
