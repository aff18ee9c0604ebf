"""What ranks print is shown, kept in files, and told in the error."""

import holdfast
from holdfast import RankExited, RankRaised

from . import ranks
from .groups import every_method, fails


@every_method
def test_output_is_shown_with_its_rank_kept_in_files_and_in_the_error(method, tmp_path, capfd):
    error = fails(RankExited, ranks.print_lines, (100,), start_method=method, log_dir=tmp_path / "logs")
    out, err = capfd.readouterr()
    assert all(f"[rank {rank}] line {i} of {rank}\n" in out for rank in (0, 1) for i in range(100))
    assert "[rank 0] to stderr\n" in err
    assert "      | line 99 of 1" in str(error)
    assert "line 2 of 1" not in str(error)
    log = (tmp_path / "logs" / "rank-1-attempt-1.log").read_text()
    assert log.splitlines()[:100] == [f"line {i} of 1" for i in range(100)]
    assert str(tmp_path / "logs" / "rank-1-attempt-1.log") in str(error)


def test_one_rank_is_shown_as_it_is(capfd):
    holdfast.spawn(ranks.print_lines, (2,), 1, start_method="fork")
    assert capfd.readouterr().out == "line 0 of 0\nline 1 of 0\n"


def test_the_traceback_is_in_the_file(tmp_path):
    fails(RankRaised, ranks.raise_in, (1,), start_method="fork", log_dir=tmp_path)
    assert "ValueError: legitimate" in (tmp_path / "rank-1-attempt-1.log").read_text()
