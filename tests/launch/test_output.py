"""What ranks print: shown by whole lines, kept in bounds, read to its end; without a process."""

import os
import time

from holdfast.launch.output import KEPT_LINES, LONGEST, RankOutput


def pipes_of(output, rank):
    """The rank's ends."""
    ends = []
    output.pipes(rank, ends)
    return ends


def printed(tmp_path, *pieces, prefixed=True, rank=0, hold=False):
    """An RankOutput after these pieces were written to the rank's stdout; `hold`: somebody keeps the pipe open."""
    output = RankOutput(2, 1, tmp_path, prefixed)
    output.open()
    pipes = [pipes_of(output, rank) for rank in range(2)]
    output.start()
    for piece in pieces:
        os.write(pipes[rank][0], piece)
    ends = [fd for pair in pipes for fd in pair]
    for fd in ends if not hold else []:
        os.close(fd)
    began = time.monotonic()
    output.finish()
    assert time.monotonic() - began < 4
    for fd in ends if hold else []:
        os.close(fd)
    return output


def test_lines_are_shown_whole_with_their_rank(tmp_path, capsys):
    printed(tmp_path, b"one\ntw", b"o\nthree", rank=1)
    assert capsys.readouterr().out == "[rank 1] one\n[rank 1] two\n[rank 1] three\n"
    assert (tmp_path / "rank-1-attempt-1.log").read_bytes() == b"one\ntwo\nthree"


def test_without_a_prefix_it_is_as_it_was(tmp_path, capsys):
    printed(tmp_path, b"a\r\nb\n", prefixed=False)
    assert capsys.readouterr().out == "a\r\nb\n"


def test_a_progress_bar_moves(tmp_path, capsys):
    """It ends its lines with a carriage return, and no newline ever comes."""
    printed(tmp_path, b"10%\r", b"20%\r")
    assert capsys.readouterr().out == "[rank 0] 10%\r[rank 0] 20%\r"


def test_the_tail_is_bounded(tmp_path):
    output = printed(tmp_path, *(b"line %d\n" % i for i in range(1000)), b"x" * 50_000)
    tail = output.tail(0)
    assert len(tail) == KEPT_LINES
    assert "line 999" in tail
    assert all(len(line) <= 400 for line in tail)
    assert output.tail(1) == ()


def test_a_line_that_does_not_end_is_shown_in_pieces(tmp_path, capsys):
    printed(tmp_path, b"y" * (LONGEST + 10))
    assert capsys.readouterr().out.count("y") == LONGEST + 10


def test_a_pipe_that_somebody_keeps_open_holds_nobody_up(tmp_path, capsys):
    """A child of the rank, which outlives it."""
    printed(tmp_path, b"last words\n", hold=True)
    assert "last words" in capsys.readouterr().out


def test_bytes_that_are_no_text_are_shown_all_the_same(tmp_path, capsys):
    printed(tmp_path, b"\xff\xfe\n")
    assert "[rank 0]" in capsys.readouterr().out
    assert (tmp_path / "rank-0-attempt-1.log").read_bytes() == b"\xff\xfe\n"


def test_a_note_is_in_the_file_alone(tmp_path, capsys):
    output = RankOutput(1, 1, tmp_path, prefixed=False)
    output.open()
    for fd in pipes_of(output, 0):
        os.close(fd)
    output.start()
    output.note(0, "Traceback ...")
    output.finish()
    assert capsys.readouterr().out == ""
    assert (tmp_path / "rank-0-attempt-1.log").read_text() == "Traceback ..."
