"""Axes, thinning and figures: literal rows for what is drawn and how it is written."""

from __future__ import annotations

import math
import random

import pytest

from bitplan.report import markup as figures
from bitplan.report.chart import Frame, format_colours, linear_axis, log_axis, thin


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([0, 10], {}, ["0", "2", "4", "6", "8", "10"]),
        ([0.61, 1.18], {}, ["0.6", "0.8", "1.0", "1.2"]),
        ([3, 3], {}, ["2.6", "2.8", "3.0", "3.2", "3.4"]),
        ([0, 0], {"zero": True}, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([5], {"zero": True}, ["0", "1", "2", "3", "4", "5"]),
        ([0, 3], {"whole": True}, ["0", "1", "2", "3"]),
        ([0, 12], {"whole": True}, ["0", "5", "10", "15"]),
        ([0, 8e9], {"formatter": figures.nbytes}, ["0\xa0B", "2\xa0GB", "4\xa0GB", "6\xa0GB", "8\xa0GB"]),
        ([-1e30, 1e30], {}, None),
        ([], {}, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_linear_axis(values, options, message):
    axis = linear_axis(values, "x", **options)
    assert all(axis.low - abs(value) * 1e-9 <= value <= axis.high + abs(value) * 1e-9 for value in values)
    assert axis.low < axis.high
    if message is not None:
        assert [text for _, text in axis.ticks] == message


@pytest.mark.parametrize(
    ("values", "base", "message"),
    [
        ([0.5, 8], 10, ["0.5", "1", "2", "5", "10"]),
        ([1e-6, 1], 10, ["1e-6", "1e-5", "0.0001", "0.001", "0.01", "0.1", "1"]),
        ([256, 32768], 2, ["256", "512", "1024", "2048", "4096", "8192", "16384", "32768"]),
        ([5, 5], 10, ["5", "10"]),
        ([0, -3], 10, ["1", "2"]),
        ([1e-30, 1e30], 10, None),
    ],
)
def test_log_axis(values, base, message):
    axis = log_axis(values, "x", base=base)
    assert all(axis.low <= value * (1 + 1e-9) and value <= axis.high * (1 + 1e-9) for value in values if value > 0)
    if message is not None:
        assert [text for _, text in axis.ticks] == message


def test_labels_keep_their_distance_and_stay_within_the_picture():
    frame = Frame(
        log_axis([256, 32768], "tokens", formatter=figures.count, base=2), linear_axis([0, 1], "y"), "a chart"
    )
    svg = frame.svg()
    assert ">16,384<" in svg
    assert ">8,192<" not in svg
    assert frame.px(256) >= frame.left
    assert frame.px(32768) <= frame.width - frame.right


def test_thinning_keeps_every_peak():
    rng = random.Random(0)
    places = [(float(x), rng.random()) for x in range(50_000)]
    places[12_345], places[34_567] = (12_345.0, 9.0), (34_567.0, -9.0)
    kept = thin(places)
    assert len(kept) < 1300
    assert {places[0], places[-1], places[12_345], places[34_567]} <= set(kept)
    assert kept == sorted(kept)
    assert thin(places[:50]) == places[:50]


def test_a_format_has_one_colour_and_two_formats_have_two():
    colours = format_colours(["mxfp4", "nvfp4", "bfloat16", "int8_row"])
    assert len(set(colours.values())) == 4
    assert colours["mxfp4"] == format_colours(["int8_g128", "mxfp4"])["mxfp4"]
    assert len(format_colours([f"f{index}" for index in range(20)])) == 20


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (figures.significant(0.0), "0"),
        (figures.significant(1234.6), "1,235"),
        (figures.significant(0.012345), "0.0123"),
        (figures.significant(1.5e-7), "1.50e-7"),
        (figures.significant(-2.5), "-2.50"),
        (figures.significant(None), figures.NONE),
        (figures.nbytes(0), "0\xa0B"),
        (figures.nbytes(999), "999\xa0B"),
        (figures.nbytes(999_600), "1.00\xa0MB"),
        (figures.nbytes(1.47e9), "1.47\xa0GB"),
        (figures.milliseconds(0.0123), "12.3\xa0µs"),
        (figures.milliseconds(46.3), "46.3\xa0ms"),
        (figures.milliseconds(12_300), "12.3\xa0s"),
        (figures.percent(0.333), "33\xa0%"),
        (figures.percent(0.0083), "0.83\xa0%"),
        (figures.percent(1.0), "100\xa0%"),
        (figures.plural(1, "row"), "1 row"),
        (figures.plural(2000, "row"), "2,000 rows"),
        (figures.significant(math.inf), "inf"),
    ],
)
def test_figures(message, expected):
    assert message == expected


def test_the_smallest_floats_have_a_place_on_a_logarithmic_axis():
    assert log_axis([5e-324], "x").share(5e-324) == 0.0
