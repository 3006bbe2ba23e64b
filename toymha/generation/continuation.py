"""What a sample says: its tokens as text, how much of it is certain while more are to come, and why it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from toymha.data.vocabulary import Tokenizer
from toymha.generation.prompts import Prompt

CUT = "\ufffd"  # how bytes that are no whole character, or not yet, are decoded


class Continuation:
    """The tokens that follow a prompt. `stopped`: why no more come: length (they are `most`), stop (a stop string),
    end (the mark that begins the next document), context (it is full, and nobody recomputes); None while they come."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Prompt,
        *,
        title: str,
        seed: int,
        most: int,
        stops: list[str],
        end: int | None,
    ) -> None:
        self.tokenizer, self.prompt, self.title = tokenizer, prompt, title
        self.seed, self.most, self.stops, self.end = seed, most, stops, end
        self.tokens: list[int] = []
        self.logprob = 0.0  # of these tokens, by the model itself: before penalty, temperature and filters; nats
        self.stopped: str | None = None if most else "length"
        self._opening: str | None = None  # once a token has come
        self._text: tuple[tuple[int, str | None], str] = ((-1, None), "")  # for how many tokens, and the text of these
        self._cut: int | None = None  # where in the text a stop string begins

    def add(self, token: int) -> bool:
        """One more token. Whether it was the last."""
        self.tokens.append(token)
        if token == self.end:
            self.stopped = "end"
        elif self.stops and (found := [at for s in self.stops if (at := self.text().find(s)) >= 0]):
            self._cut, self.stopped = min(found), "stop"
        elif len(self.tokens) == self.most:
            self.stopped = "length"
        return self.stopped is not None

    def opening(self) -> str:
        """The prompt as the tokenizer spells it, with what stands between it and the text."""
        if not self.tokens:
            return self._closed(self.tokenizer.decode(self.prompt.ids))
        if self._opening is None:
            whole, first = (self.tokenizer.decode([*ids, self.tokens[0]]) for ids in (self.prompt.ids, []))
            self._opening = whole.removesuffix(first)
        return self._opening

    def text(self) -> str:
        """All that follows: without the stop string and what came with it, without the mark that ended it."""
        state = (len(self.tokens), self.stopped)
        if self._text[0] != state:  # asked for several times a token
            self._text = (state, self._decoded())
        return self._text[1][: self._cut]

    def _decoded(self) -> str:
        said = self.tokens[:-1] if self.stopped == "end" else self.tokens
        if not said:
            return ""
        # Together with the prompt: whether a pair's words have spaces between them depends on what came before.
        whole = self._closed(self.tokenizer.decode([*self.prompt.ids, *said]))
        return whole[len(self.opening()) :]

    def certain(self) -> str:
        """The beginning of `text()` that no later token changes."""
        text = self.text()
        if self.stopped:
            return text
        text = text.rstrip(CUT)
        longest = max(map(len, self.stops), default=0)
        tail = next((n for n in range(min(longest, len(text)), 0, -1) if self._begins_stop(text[-n:])), 0)
        return text[: len(text) - tail]

    def shown(self) -> str:
        """Prompt and certain text, as `output=text` prints them; the token that an empty prompt starts from is none."""
        return ("" if self.prompt.empty else self.opening()) + self.certain()

    def to_dict(self) -> dict[str, object]:
        """What `output=jsonl` prints."""
        return {
            "prompt": self.prompt.text,
            "text": self.text(),
            "tokens": self.tokens,
            "seed": self.seed,
            "stopped": self.stopped,
            "logprob": round(self.logprob, 4),  # the sum depends on what was computed together, by 1e-6
        }

    def _closed(self, text: str) -> str:
        """Documents are lines, and their tokenizers end whatever they decode with a line end; here more may follow."""
        return text if self.end is None else text.removesuffix("\n")

    def _begins_stop(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self.stops)


def json_line(row: dict[str, object]) -> str:
    """One JSON object, in letters that the reader of stdout knows."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(row, ensure_ascii=not utf8)


class Lines:
    """Samples printed one after the other, in order, each when it is over and those before it are."""

    def __init__(self, samples: list[Continuation], alone: bool) -> None:
        self.samples, self.told = samples, 0

    def tell(self) -> None:
        while self.told < len(self.samples) and self.samples[self.told].stopped:
            print(self.line(self.samples[self.told]), flush=True)
            self.told += 1

    def line(self, sample: Continuation) -> str:
        return json_line(sample.to_dict())

    def end_line(self) -> None:
        """What there is to do when it is interrupted."""


class Texts(Lines):
    """As text: one that is alone as it is made, several each under a line of its own."""

    def __init__(self, samples: list[Continuation], alone: bool) -> None:
        super().__init__(samples, alone)
        self.alone, self.printed = alone, ""

    def tell(self) -> None:
        if not self.alone:
            return super().tell()
        for sample in self.samples[self.told :]:
            print(sample.shown()[len(self.printed) :], end="", flush=True)
            self.printed = sample.shown()
            if sample.stopped:
                self.end_line()
                self.told = 1

    def line(self, sample: Continuation) -> str:
        return f"--- {sample.title} ---\n{sample.shown()}".removesuffix("\n") + "\n"

    def end_line(self) -> None:
        if self.printed and not self.printed.endswith("\n"):
            print(flush=True)


OUTPUTS: dict[str, Callable[[list[Continuation], bool], Lines]] = {"text": Texts, "jsonl": Lines}
