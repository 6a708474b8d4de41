"""Slurm's value formats, and rows with hostile text in their fields."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters.errors import SlurmParseError
from clusters.slurm.fields import (
    FIELD_SEPARATOR,
    ExitStatus,
    SlurmCommands,
    Tres,
    expand_nodes,
    format_minutes,
    new_separator,
    parse_duration_s,
    parse_exit_status,
    parse_mem_mib,
    parse_pairs,
    parse_time,
    parse_tres,
    split_raw_rows,
    split_rows,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("02:03:04", 7384),
        ("03:04", 184),
        ("5", 300),
        ("1-0", 86400),
        ("2-12:30", 217800),
        ("00:00.123", 0),
        ("365-00:00:00", 31536000),
        ("UNLIMITED", None),
        ("INFINITE", None),
        ("Partition_Limit", None),
        ("NOT_SET", None),
        ("NONE", None),
        ("", None),
    ],
)
def test_durations_are_parsed_to_seconds(text, seconds):
    assert parse_duration_s(text) == seconds


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_durations_with_days_round_trip(days, hours, minutes, seconds):
    text = f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
    assert parse_duration_s(text) == ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@pytest.mark.parametrize("text", ["soon", "1:2:3:4", "-5", "1-", "12:xx"])
def test_invalid_duration_raises(text):
    with pytest.raises(SlurmParseError):
        parse_duration_s(text)


@pytest.mark.parametrize(("seconds", "minutes"), [(1, "1"), (60, "1"), (61, "2"), (3600, "60")])
def test_time_limit_is_rounded_up(seconds, minutes):
    assert format_minutes(seconds) == minutes


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("16G", 16384),
        ("4000M", 4000),
        ("4000", 4000),
        ("2Gn", 2048),
        ("500Mc", 500),
        ("2.50T", 2621440),
        ("2048K", 2),
    ],
)
def test_memory_is_parsed_to_mib(text, mib):
    assert parse_mem_mib(text) == mib


@pytest.mark.parametrize("text", ["16X", "lots", "G", "-1M"])
def test_invalid_memory_raises(text):
    with pytest.raises(SlurmParseError):
        parse_mem_mib(text)


def test_timestamps_are_parsed_as_utc():
    assert parse_time("1700000000") == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert parse_time("2023-11-14T22:13:20") == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert [parse_time(text) for text in ("N/A", "Unknown", "None", "", "0")] == [None] * 5
    with pytest.raises(SlurmParseError):
        parse_time("Tomorr 12:00")


def test_exit_statuses_are_parsed():
    assert parse_exit_status("3:0") == ExitStatus(3)
    assert parse_exit_status("0:125") == ExitStatus(0, 125)
    assert parse_exit_status("") is None
    with pytest.raises(SlurmParseError):
        parse_exit_status("three")


def test_tres_text_is_parsed():
    assert parse_tres("billing=4,cpu=4,gres/gpu:a100=2,gres/gpu=2,mem=16G,node=1") == Tres(
        cpus=4, mem_mib=16384, nodes=1, gpus=2
    )
    assert parse_tres("gres/gpu:a100=2,gres/gpu:v100=1").gpus == 3
    assert parse_tres("") == Tres()
    assert parse_tres("cpu=4") == Tres(cpus=4)
    with pytest.raises(SlurmParseError):
        parse_tres("cpu")


def test_node_lists_are_expanded_and_folded():
    assert expand_nodes("n[1-3,7],login1") == ("login1", "n1", "n2", "n3", "n7")
    assert expand_nodes("None assigned") == expand_nodes("(null)") == expand_nodes("") == ()
    with pytest.raises(SlurmParseError):
        expand_nodes("n[1-")


def test_pairs_may_contain_spaces_and_the_first_duplicate_key_wins():
    pairs = parse_pairs("NodeName=n1 State=DOWN OS=Linux 6.1 #1 SMP Reason=gone State=IDLE for now")
    assert pairs["OS"] == "Linux 6.1 #1 SMP"
    assert pairs["State"] == "DOWN"


def test_query_argv_sets_the_environment():
    argv = SlurmCommands(bin_dir="/opt/slurm/bin/", slurm_conf="/etc/s.conf").query_argv(
        "squeue", "-h"
    )
    assert argv[0] == "env"
    assert argv[-5:] == [
        "TZ=UTC",
        "SLURM_TIME_FORMAT=%s",
        "SLURM_CONF=/etc/s.conf",
        "/opt/slurm/bin/squeue",
        "-h",
    ]
    assert "SQUEUE_FORMAT2" in argv
    assert SlurmCommands().action_argv("sbatch", "x") == ["sbatch", "x"]


# -- rows ------------------------------------------------------------------------------------------

# Any text, with extra weight on the characters that delimit fields and rows.
hostile_text = st.text(
    alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("\x1f\x1e\n|,'\"")),
    max_size=40,
)
rows = st.lists(st.lists(hostile_text, min_size=3, max_size=3), max_size=6)


def _format_rows(table, separator):
    return "".join("".join(f"{value}{separator}" for value in row) + "\n" for row in table)


@given(rows)
def test_hostile_fields_round_trip(table):
    separator = new_separator()
    assert list(split_rows(_format_rows(table, separator), separator, 3)) == table


@given(rows)
def test_raw_rows_equal_split_rows_or_are_none(table):
    separator = new_separator()
    whole = split_raw_rows(_format_rows(table, separator), separator, 3)
    if whole is not None:
        assert [row.split(FIELD_SEPARATOR) for row in whole] == table
    else:
        assert any(
            FIELD_SEPARATOR in value or value.startswith("\n") for row in table for value in row
        )


@given(rows.filter(bool), st.data())
def test_raw_rows_of_truncated_output_are_none_or_complete(table, data):
    separator = "\x1f1234abcd"
    text = _format_rows(table, separator)
    cut = data.draw(st.integers(0, len(text) - 1))
    whole = split_raw_rows(text[:cut], separator, 3)
    if whole is not None:
        assert _format_rows((row.split(FIELD_SEPARATOR) for row in whole), separator) == text[:cut]


@given(rows.filter(bool), st.data())
def test_truncated_output_raises_or_ends_between_rows(table, data):
    separator = "\x1f1234abcd"
    whole = _format_rows(table, separator)
    cut = data.draw(st.integers(0, len(whole) - 1))
    if whole[:cut] in {_format_rows(table[:count], separator) for count in range(len(table))}:
        # Truncation exactly between two rows cannot be detected; the rows before it are complete.
        assert _format_rows(split_rows(whole[:cut], separator, 3), separator) == whole[:cut]
    else:
        with pytest.raises(SlurmParseError):
            list(split_rows(whole[:cut], separator, 3))


def test_truncated_row_is_in_the_error_detail():
    with pytest.raises(SlurmParseError) as caught:
        list(split_rows("1,a,\n2,", ",", 2))
    assert "2" in caught.value.detail


def test_job_name_cannot_forge_a_row():
    separator = new_separator()
    name = "x\x1f\n999\x1fCD\x1fmine\x1f\n"
    assert list(split_rows(_format_rows([["1", "R", name]], separator), separator, 3)) == [
        ["1", "R", name]
    ]


def test_separators_are_unique():
    assert len({new_separator() for _ in range(100)}) == 100
