# SPDX-License-Identifier: Apache-2.0
"""Whatever ``kv_transfer_params`` hold: options, or an error of one field."""

import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllm.v1.hidden_states.request import (
    INLINE,
    LAYERS,
    OPTIONS,
    PATH,
    HiddenStatesRequest,
    RequestError,
    parse_request,
    refuse_beyond_inline,
    refuse_what_cannot_travel,
)
from vllm.v1.hidden_states.response import has_several_prompts

ROOTS = ("/store/hidden", "/mnt/more")
CONFIG = SimpleNamespace(
    layer_ids=(6, 0, 3),
    extract_by_default=True,
    allow_custom_save_path=True,
    save_roots=ROOTS,
)
CLOSED = SimpleNamespace(**(vars(CONFIG) | {"allow_custom_save_path": False}))

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10),
    st.integers(),
    st.floats(),
    st.text(max_size=40),
    st.sampled_from(["6", "true", "a.safetensors", "/etc/passwd", "\ud800"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.text(max_size=5), inner, max_size=3),
    ),
    max_leaves=12,
)
parts = st.one_of(
    st.sampled_from(["..", ".", "", "a", "b.safetensors", "store", "hidden", "~"]),
    st.text(max_size=8),
)
paths = st.builds(
    lambda start, middle, end: start + "/".join(middle) + end,
    st.sampled_from(["", "/", "//", "/store/hidden/", "/mnt/more/", "/store/hidden"]),
    st.lists(parts, max_size=6),
    st.sampled_from([".safetensors", "/x.safetensors", "", ".lock"]),
)
fields = st.fixed_dictionaries(
    {},
    optional={name: values for name in OPTIONS}
    | {PATH: st.one_of(values, paths), LAYERS: st.one_of(values, st.just([3, 6]))},
)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(params=fields)
@example(params={PATH: "/store/hidden/../../etc/x.safetensors"})
@example(params={PATH: "/store/hidden2/x.safetensors"})
def test_options_or_an_error_of_one_field(params):
    try:
        found = parse_request(params, CONFIG)
    except RequestError as error:
        assert re.match(r"kv_transfer_params(\.\w+)? ", f"{error} ")
        assert len(str(error)) < 1000
        return
    for name, value in params.items():
        if name in (LAYERS, PATH):
            assert value is None or isinstance(value, (list, str))
        else:
            assert value is None or isinstance(value, bool)
    if found is None:
        assert params["extract_hidden_states"] is False
        return
    if found.columns is not None:
        assert len(set(found.columns)) == len(found.columns) > 0
        assert [CONFIG.layer_ids[column] for column in found.columns] == params[LAYERS]
    assert (found.path is None) == (params.get(PATH) is None)
    if found.path is not None:
        assert found.path == os.path.normpath(found.path)
        assert any(found.path.startswith(f"{root}/") for root in ROOTS)
        assert found.path.endswith(".safetensors") and "\0" not in found.path
        json.dumps(found.path).encode()


@unhurried
@given(path=paths)
def test_no_path_where_none_is_allowed(path):
    try:
        parse_request({PATH: path}, CLOSED)
    except RequestError as error:
        assert "allow_custom_save_path" in str(error)
    else:
        raise AssertionError(path)


@pytest.mark.parametrize("end", ["", ".lock", ".partial", ".error", ".whole"])
def test_no_directory_where_a_file_may_come(end):
    for path in (f"a.safetensors{end}/b.safetensors", f"c/a.safetensors{end}/d/e"):
        with pytest.raises(RequestError, match="a directory in it ends as files do"):
            parse_request({PATH: f"{path}.safetensors"}, CONFIG)
    for path in ("lock/partial.error", f"a{end}/b", f"a.safetensors{end}"):
        assert parse_request({PATH: f"{path}.safetensors"}, CONFIG).path


def test_arrays_are_no_lists():
    with pytest.raises(RequestError, match=f"{LAYERS}.*not a non-empty list"):
        parse_request({LAYERS: np.array([3, 6])}, CONFIG)


@pytest.mark.parametrize("name", [f"{'x' * 240}", f"a/{'y' * 241}/b", "\u20ac" * 80])
def test_a_name_that_no_file_system_takes(name):
    with pytest.raises(RequestError, match="a name of more than 240 bytes"):
        parse_request({PATH: f"{name}.safetensors"}, CONFIG)


@pytest.mark.parametrize(
    "options",
    [
        {LAYERS: [3]},
        {INLINE: True},
        {PATH: "a.safetensors"},
        {"include_output_tokens": True},
    ],
)
def test_who_says_how_opts_in(options):
    """An option alone would be passed over where extraction is not the default."""
    opt_in = SimpleNamespace(**(vars(CONFIG) | {"extract_by_default": False}))
    assert parse_request(options, opt_in) is not None
    assert parse_request(options | {"extract_hidden_states": False}, opt_in) is None
    assert parse_request(dict.fromkeys(options), opt_in) is None
    assert parse_request({}, opt_in) is None


@given(num_tokens=st.integers(1, 2000), bytes_per_row=st.integers(1, 10**6))
def test_what_a_response_may_carry(num_tokens, bytes_per_row):
    limit = 8 << 20
    inline = HiddenStatesRequest(None, False, None, True)
    try:
        refuse_beyond_inline(inline, num_tokens, bytes_per_row, limit)
    except RequestError as error:
        assert num_tokens * bytes_per_row > limit
        assert error.option.endswith(INLINE)
    else:
        assert num_tokens * bytes_per_row <= limit
    file = HiddenStatesRequest(None, False)
    refuse_beyond_inline(file, num_tokens, bytes_per_row, limit)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, [{"a": 10**30}]])
def test_integers_that_cannot_travel(value):
    with pytest.raises(RequestError, match="beyond 64 bits"):
        refuse_what_cannot_travel({"of another": value})
    refuse_what_cannot_travel({"of another": [2**64 - 1, -(2**63), True]})


@pytest.mark.parametrize(
    "fields, is_several",
    [
        ({"prompt": "a"}, False),
        ({"prompt": [1, 2, 3]}, False),
        ({"prompt": ["a"]}, False),
        ({"prompt": [[1, 2]]}, False),
        ({"prompt": []}, False),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt_embeds": "AAAA"}, False),
        ({"prompt_embeds": ["AAAA", "AAAA"]}, True),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, True),
        ({"messages": [{"role": "user"}, {"role": "user"}]}, False),
        ({"messages": [[{"role": "user"}], [{"role": "user"}]]}, True),
        ({"messages": []}, False),
        ({"input": "a response's"}, False),
    ],
)
def test_which_requests_have_several_prompts(fields, is_several):
    assert has_several_prompts(SimpleNamespace(**fields)) is is_several
