"""Libraries of several kernels: which kernels they hold, and where they are found again."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from gradsync_fx._torch import inductor_config
from gradsync_fx.lowering import kernel_libraries
from gradsync_fx.lowering.kernel_libraries import Source, grouped, joined, kernels_of
from tests.lowering.kernels import adding, libraries, result


pytestmark = [pytest.mark.inductor, pytest.mark.captured]


def test_one_library_holds_several_kernels(cache: Path) -> None:
    one, two = adding("1.0f"), adding("2.0f")
    made = kernels_of([one, two])
    assert result(made[one]) == [1.0, 2.0, 3.0, 4.0]
    assert result(made[two]) == [2.0, 3.0, 4.0, 5.0]
    assert len(libraries(cache)) == 1
    # Another program has one of them, and one more: only that is compiled.
    three = adding("3.0f")
    again = kernels_of([two, three])
    assert again[two] is made[two]
    assert result(again[three]) == [3.0, 4.0, 5.0, 6.0]
    assert len(libraries(cache)) == 2


def test_a_kernel_is_found_on_disk(cache: Path) -> None:
    one, two = adding("1.0f"), adding("2.0f")
    kernels_of([one, two])
    with (
        mock.patch.object(kernel_libraries, "_LOADED", {}),
        mock.patch.object(kernel_libraries, "started_library") as compiled,
    ):
        again = kernels_of([two])
    assert not compiled.called
    assert result(again[two]) == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("note", ["", "nonsense", "../outside.so", "missing.so", "\0", "locks"])
def test_a_note_that_says_nothing_sensible_is_no_note(cache: Path, note: str) -> None:
    one = adding("1.0f")
    (cache.parent / "outside.so").touch()
    kernels_of([one])
    (written,) = (p for p in (cache / "gradsync_fx" / "kernels").rglob("*") if p.is_file())
    written.write_text(note)
    with mock.patch.object(kernel_libraries, "_LOADED", {}):
        again = kernels_of([one])
    assert result(again[one]) == [1.0, 2.0, 3.0, 4.0]
    assert written.read_text() != note


def test_a_note_that_leads_to_another_library_leads_to_no_kernel(cache: Path) -> None:
    """It is compiled anew: the other library has no kernel of that name."""
    one, two = adding("1.0f"), adding("2.0f")
    kernels_of([one])
    kernels_of([two])
    notes = [p for p in (cache / "gradsync_fx" / "kernels").rglob("*") if p.is_file()]
    told = [note.read_text() for note in notes]
    for note, text in zip(notes, reversed(told), strict=True):
        note.write_text(text)
    with mock.patch.object(kernel_libraries, "_LOADED", {}):
        made = kernels_of([one, two])
    assert result(made[one]) == [1.0, 2.0, 3.0, 4.0]
    assert result(made[two]) == [2.0, 3.0, 4.0, 5.0]


def test_what_is_no_kernel_of_the_command_is_compiled_anew(cache: Path) -> None:
    """Other settings of the compiler are other kernels."""
    one = adding("1.0f")
    kernels_of([one])
    with inductor_config.patch({"cpp.enable_floating_point_contract_flag": "fast"}):
        kernels_of([one])
    assert len(libraries(cache)) == 2


def test_a_source_with_macros_stays_alone() -> None:
    assert adding("1.0f").can_be_joined
    assert Source((), "#include <x>\n  #pragma omp parallel\n").can_be_joined
    assert not Source((), "#include <x>\n#define LANES 8\n").can_be_joined
    assert not Source((), "  #ifdef LANES\n").can_be_joined


def test_includes_stand_outside_of_namespaces() -> None:
    text = joined({"kernel_a": adding("1.0f"), "kernel_b": adding("2.0f")})
    before, *_ = text.split("namespace", 1)
    assert before.count("#include <torch/csrc/inductor/cpp_prefix.h>") == 1
    assert text.count("#include") == before.count("#include")


def test_files_for_each_thread_where_there_is_enough() -> None:
    kernels = [Source((), f"{i} " + "x" * kernel_libraries.LEAST) for i in range(5)]
    assert [len(g) for g in grouped(kernels, 2)] == [3, 2]
    assert len(grouped(kernels, 32)) == 5
    assert [len(g) for g in grouped([adding("1.0f"), adding("2.0f")], 32)] == [2]
    assert grouped([], 2) == []
