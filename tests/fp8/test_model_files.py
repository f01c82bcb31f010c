"""Model descriptions from files: config.json, YAML, `defaults`, and the place of a policy."""

from __future__ import annotations

import json

import pytest

from bitplan.fp8.loongforge import find_policy, open_model, open_yaml_model
from bitplan.fp8.policy.vocabulary import ModelConfigError

SIZES = "num_layers: 2\nhidden_size: 128\nffn_hidden_size: 256\nnum_attention_heads: 4\n"
LLAMA = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def test_config_json_a_folder_and_yaml_give_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_attention_heads": 4}))
    (tmp_path / "m.yaml").write_text(SIZES + "swiglu: true\ntensor_model_parallel_size: 2\n")
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "m.yaml"):
        (part,) = open_model(path).parts
        assert (part.hidden, part.ffn, part.dense_blocks, part.gated) == (128, 256, 2, True)
    assert open_model(tmp_path / "m.yaml").parallel().tp == 2
    assert open_model(tmp_path).parallel().tp == 1


def test_defaults_are_found_beside_and_above_up_to_the_root(tmp_path):
    models = tmp_path / "configs" / "models"
    models.mkdir(parents=True)
    (models / "base.yaml").write_text(SIZES)
    (tmp_path / "configs" / "root.yml").write_text("hidden_size: 256\n")
    path = models / "m.yaml"
    path.write_text("defaults: [base, root, _self_]\nfp8: e4m3\n")
    model = open_model(path)
    assert model.parts[0].hidden == 256
    assert model.options["llm"].fp8 == "e4m3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [nowhere]\n" + SIZES, "defaults name 'nowhere', and there is no such file"),
        (SIZES + "fp8_recpie: blockwise\n", "unknown key fp8_recpie"),
        (SIZES + "fp8: e4m3\nfp8: hybrid\n", "key 'fp8' appears twice"),
        (SIZES + "selective_fp8: true\n", "selective_fp8 chooses where FP8 is used, and fp8 is not set"),
        (SIZES + "fp8: e4m3\nselective_fp8: true\n", "add fp8_dynamic_policy_path"),
        ("", "empty"),
    ],
)
def test_bad_yaml(text, message, tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(ModelConfigError, match=message):
        open_model(path)


@pytest.mark.parametrize("name", ["../outside", "link", "ABSOLUTE", "sub/../../outside", "a" * 5000, "x\\0y"])
def test_defaults_do_not_leave_the_folder(name, tmp_path):
    (tmp_path / "here" / "sub").mkdir(parents=True)
    (tmp_path / "outside.yaml").write_text(SIZES)
    (tmp_path / "here" / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    path = tmp_path / "here" / "m.yaml"
    path.write_text(f'defaults: ["{name.replace("ABSOLUTE", str(tmp_path / "outside"))}"]\n')
    with pytest.raises(ModelConfigError, match=r"lies outside of|must be a relative path") as caught:
        open_model(path)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ModelConfigError, match="cannot be read"):
        open_model(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelConfigError, match="not UTF-8"):
        open_model(tmp_path / "b.yaml")


def test_a_policy_is_looked_for_from_the_yaml(tmp_path, monkeypatch):
    (tmp_path / "configs" / "models").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    yaml = tmp_path / "configs" / "models" / "m.yaml"
    with pytest.raises(
        ModelConfigError, match=r"m\.yaml: fp8_dynamic_policy_path names 'policy_of_this_test', and there is no"
    ):
        find_policy("policy_of_this_test", yaml)
    for place in (
        tmp_path / "elsewhere" / "policy_of_this_test",
        tmp_path / "policy_of_this_test",
        yaml.with_name("policy_of_this_test"),
    ):  # nearer and nearer
        place.write_text("{}")
        assert find_policy("policy_of_this_test", yaml).resolve() == place
    assert find_policy("configs/models/policy_of_this_test", yaml) == yaml.with_name(
        "policy_of_this_test"
    )  # from the project's root


def test_fp8_keys_alone_describe_no_layers(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("model:\n  foundation:\n    fp8: e4m3\n  image_encoder:\n    fp8: e4m3\n")
    assert set(open_yaml_model(path).options) == {"llm", "vit"}
    with pytest.raises(ModelConfigError, match="has FP8 keys and no sizes"):
        open_model(path)
