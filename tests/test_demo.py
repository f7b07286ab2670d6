"""The demo: its corpus, its model against NumPy, its command line.

The command runs in a subprocess, because it chooses the number of virtual devices.
"""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from jax_pcie.__main__ import main
from jax_pcie.demo import assets, cli, corpus, measure, model, packing, reference
from jax_pcie.demo.errors import DemoError

MAX_TOKENS = 32


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return assets.load_tensors()


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return corpus.sentences(24)


def embed(tensors: dict[str, np.ndarray], token_ids: list[list[int]]) -> np.ndarray:
    batch, places = packing.pack(token_ids, MAX_TOKENS, multiple=2)
    weights, batch = model.keep_used_words(model.from_tensors(tensors), batch)
    problem = measure.Problem(weights, batch, places)
    return measure.embed_unsharded(problem, jax.devices()[0])


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jax_pcie", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_corpus_is_deterministic_and_has_no_duplicates(
    sentences: list[str],
) -> None:
    assert corpus.sentences(24) == sentences
    assert len(set(sentences)) == 24


def test_the_corpus_is_the_standard_librarys_own_text(sentences: list[str]) -> None:
    import _collections_abc

    docstring = " ".join((_collections_abc.__doc__ or "").split())
    assert any(docstring.startswith(sentence) for sentence in sentences)


def test_a_corpus_larger_than_the_library_is_an_error() -> None:
    with pytest.raises(DemoError, match="9999 sentences were asked for"):
        corpus.sentences(9999)


def test_tokens_are_words_that_the_model_knows(sentences: list[str]) -> None:
    token_ids = assets.tokenize(sentences, MAX_TOKENS)
    start, end, unknown = 101, 102, 100  # [CLS], [SEP], [UNK] of BERT's vocabulary
    assert all(ids[0] == start and ids[-1] == end for ids in token_ids)
    assert all(6 + 2 <= len(ids) <= MAX_TOKENS for ids in token_ids)
    assert not any(unknown in ids for ids in token_ids)


def test_packing_keeps_every_token_in_its_place(sentences: list[str]) -> None:
    token_ids = assets.tokenize(sentences, MAX_TOKENS)
    batch, places = packing.pack(token_ids, MAX_TOKENS, multiple=4)
    assert len(batch.ids) % 4 == 0
    for ids, (row, segment) in zip(token_ids, places, strict=True):
        members = batch.segments[row] == segment
        assert batch.ids[row, members].tolist() == ids
        assert batch.positions[row, members].tolist() == list(range(len(ids)))
    assert (batch.segments >= 0).sum() == sum(map(len, token_ids))


def test_a_sentence_longer_than_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="sentence 1 has 9 tokens, a row takes 1 to 8"):
        packing.pack([[1], [1] * 9], 8, multiple=1)


def test_the_packed_float32_model_agrees_with_numpy(
    tensors: dict[str, np.ndarray], sentences: list[str]
) -> None:
    token_ids = assets.tokenize(sentences[:6], MAX_TOKENS)
    error = cli.check_agreement(
        embed(tensors, token_ids), reference.embed(tensors, token_ids)
    )
    assert error <= reference.TOLERANCE


def test_the_check_against_numpy_sees_one_wrong_weight(
    tensors: dict[str, np.ndarray], sentences: list[str]
) -> None:
    token_ids = assets.tokenize(sentences[:2], MAX_TOKENS)
    name = "encoder.layer.5.attention.output.dense.bias"
    wrong = tensors | {name: np.zeros_like(tensors[name])}
    with pytest.raises(DemoError, match="off the NumPy one by"):
        cli.check_agreement(
            embed(wrong, token_ids), reference.embed(tensors, token_ids)
        )


def test_a_nan_is_no_agreement() -> None:
    with pytest.raises(DemoError, match="by nan"):
        cli.check_agreement(np.array([np.nan]), np.array([0.0]))


def test_a_paraphrase_is_closer_than_another_subject(
    tensors: dict[str, np.ndarray],
) -> None:
    texts = [
        "Return the number of bytes in the file.",
        "Gives the size of a file, counted in bytes.",
        "The orchestra played a slow waltz by the river.",
    ]
    same, paraphrase, other = embed(tensors, assets.tokenize(texts, MAX_TOKENS))
    assert same @ paraphrase > 0.5 > 0.2 > same @ other


@pytest.mark.parametrize(
    ("num_devices", "shape"),
    [(2, (1, 2)), (3, (1, 3)), (4, (1, 4)), (5, (1, 4)), (6, (1, 6)), (8, (2, 4))],
)
def test_the_mesh_uses_devices_that_share_the_heads_evenly(
    num_devices: int, shape: tuple[int, int]
) -> None:
    mesh = measure.make_mesh(jax.devices("cpu")[:num_devices])
    assert mesh.devices.shape == shape


def test_one_device_has_nothing_to_sum() -> None:
    with pytest.raises(DemoError, match="2 are needed"):
        measure.make_mesh(jax.devices("cpu")[:1])


def test_drift_is_one_minus_the_cosine_of_the_angle() -> None:
    angle = 1e-6  # its 1 - cos is below float32's spacing at 1
    turned = np.array([[3 * np.cos(angle), 3 * np.sin(angle)]])
    drift = measure.cosine_drift(turned, np.array([[1.0, 0.0]], np.float32))
    np.testing.assert_allclose(drift, angle**2 / 2, rtol=1e-6)


def test_the_command_reports_equal_ranks_and_a_small_drift_as_json() -> None:
    done = run_cli(
        *("demo", "--platform", "cpu", "--json", "--sentences", "16"),
        *("--modes", "psum", "i8_a2a"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["header"]["mesh"] == {"data": 2, "tensor": 4}
    assert document["header"]["num_sentences"] == 16
    psum, int8 = document["rows"]
    assert (psum["mode"], int8["mode"]) == ("psum", "i8_a2a")
    assert psum["same_bits"]
    assert int8["same_bits"]
    # The largest of 128 values is at most sqrt(128) times their root mean square, so a
    # rounding to amax / 127 has at most this variance relative to theirs. Each sum is
    # rounded twice; independent errors add, and half their sum is the angle's 1 - cos.
    variance = 128 / 127**2 / 12
    assert psum["worst_drift"] < int8["worst_drift"] < model.NUM_SUMS * 2 * variance / 2
    # 132 bytes for 128 bf16 values, and spans of whole blocks.
    assert 0.5 < int8["wire_bytes"] / psum["wire_bytes"] < 0.55


def test_an_unknown_mode_is_named_and_the_known_ones_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--modes", "psum", "i8_rnig"])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert "i8_rnig" in message
    for mode in ("psum", "i8_ring", "e4m3_a2a", "mx"):
        assert mode in message.partition("error:")[2]


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_a_number_of_sentences_out_of_range_is_an_error(
    count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--sentences", count])
    assert f"'{count}' is not in 1 to" in capsys.readouterr().err


def test_a_missing_extra_says_what_to_install() -> None:
    with pytest.raises(DemoError, match=r"pip install 'jax-pcie\[demo\]'"):
        assets.require("a_module_that_nobody_has")


def test_no_command_prints_the_help_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    assert "demo" in capsys.readouterr().err


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["dmeo"])
    assert exit_info.value.code == 2
    assert "'dmeo'" in capsys.readouterr().err


def test_importing_the_command_line_touches_no_device() -> None:
    program = (
        "import jax, jax_pcie.__main__, jax_pcie.demo.cli\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"  # refused once they exist
        "print(len(jax.devices('cpu')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "3\n", done.stderr
