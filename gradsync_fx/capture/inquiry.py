"""Asks a traced step which capture some arguments lead to, without running it.

Dynamo has no such query: its guards choose a program, or a trace makes one, and then it runs. So the program that is
called here ends the call at once, by an exception that carries the answer:

    find(arguments) -> guards, and a trace where none fits -> what would run, and the flat inputs that it would get
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gradsync_fx.errors import NoBackwardError


Runnable = TypeVar("Runnable", bound=Callable[[list[Any]], Any])


class _Answer(Exception):
    """Ends a call that only asks."""

    def __init__(self, run: Any, inputs: list[Any]) -> None:
        super().__init__()
        self.run, self.inputs = run, inputs


class Inquiry(Generic[Runnable]):
    """on_capture: what a capture becomes to run. The same is asked of it here; it runs unless somebody asks."""

    def __init__(self, on_capture: Callable[[Any], Runnable]) -> None:
        self._on_capture = on_capture
        self._asked = False

    def on_capture(self, capture: Any) -> Callable[[list[Any]], Any]:
        run = self._on_capture(capture)

        def run_or_answer(inputs: list[Any]) -> Any:
            if self._asked:
                raise _Answer(run, inputs)
            return run(inputs)

        return run_or_answer

    def ask(self, call: Callable[[], Any]) -> tuple[Runnable, list[Any]]:
        """What a call would run. Raises what its trace raises; `NoBackwardError` where there is nothing to trace."""
        self._asked = True
        try:
            call()
        except _Answer as answer:
            return answer.run, answer.inputs
        finally:
            self._asked = False
        raise NoBackwardError(
            "the step",
            seen="it came to its end, and computed nothing that could be captured",
            wanted="a whole training step: forward, backward and optimizer.step()",
            fix="call loss.backward() in the step with these arguments, before optimizer.step()",
        )


class TracedStep(Generic[Runnable]):
    """A step that is captured as needed: to be called like it, or asked."""

    def __init__(self, call: Callable[..., Any], inquiry: Inquiry[Runnable]) -> None:
        self._call, self._inquiry = call, inquiry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def find(self, *args: Any, **kwargs: Any) -> tuple[Runnable, list[Any]]:
        """What such a call would run, with the flat inputs that it would be given; nothing runs."""
        return self._inquiry.ask(lambda: self._call(*args, **kwargs))
