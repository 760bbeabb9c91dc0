"""The progress bar: plain lines in a file, a live bar on a terminal."""

import io

from dmljax.hints import Progress


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _lines(stream):
    return stream.getvalue().splitlines()


def test_a_file_gets_a_line_at_the_first_report_and_at_each_tenth():
    stream = io.StringIO()
    with Progress("train", 200, stream=stream) as progress:
        for _ in range(200):
            progress.advance()
    assert _lines(stream) == ["train 1/200", *(f"train {n}/200" for n in range(20, 201, 20))]


def test_a_resumed_count_prints_its_text_and_other_lines():
    stream = io.StringIO()
    progress = Progress("step", 100, start=40, stream=stream)
    progress.update(45, "loss 0.5")
    progress.print("saved")
    progress.update(49, "loss 0.4")
    progress.advance(6)
    progress.close()
    assert _lines(stream) == ["step 45/100  loss 0.5", "saved", "step 55/100"]


def test_a_terminal_gets_a_line_that_changes():
    stream = _Terminal()
    with Progress("step", 8, stream=stream) as progress:
        progress.update(8, "loss 0.5")
        progress.print("a line")
    text = stream.getvalue()
    assert "a line" in text
    assert "step 8/8  loss 0.5  0 seconds left" in text and text.endswith("\n")


def test_a_total_of_0_prints_nothing():
    stream = io.StringIO()
    with Progress("test", 0, stream=stream):
        pass
    assert not stream.getvalue()
