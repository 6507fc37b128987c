import pytest

from penstock.core.errors import ConfigError
from penstock.perf.catalogue import find_shape, known_shapes


def test_known_shapes_have_their_parameters():
    billions = {name: find_shape(name).total_params() / 1e9 for name in known_shapes()}
    assert billions == {
        "deepseek-r1": pytest.approx(671, rel=0.001),
        "llama-3.1-8b": pytest.approx(8.03, rel=0.01),
        "llama-3.1-70b": pytest.approx(70.6, rel=0.01),
    }


def test_a_directory_beside_the_graph_is_found(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(
        '{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}'
    )
    assert find_shape("mine", beside=tmp_path).layers == 2
    assert find_shape(str(tmp_path / "mine")).vocab == 99


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"model llama-3\.1-9b: its shape is not known; did you mean 'llama-3.1-8b'"
    ):
        find_shape("llama-3.1-9b")
