"""`megappo config …`"""

import pytest
from typer.testing import CliRunner

from megappo.config.keys import iter_keys, markdown, rich_table
from megappo.config.load import load_config
from megappo.errors import UserError
from megappo_cli.config_cmd import app


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_show_prints_the_resolved_configuration(exp):
    done = run("show", exp.yaml, "actor.ppo_epochs=2")
    assert done.exit_code == 0
    again = exp.root / "again.yaml"
    again.write_text(done.stdout)
    assert load_config(again).critic.ppo_epochs == 2


def test_show_needs_no_model_and_no_data(exp):
    exp.write("model: {path: nowhere}\n")
    assert run("show", exp.yaml).exit_code == 0


def test_check_says_ok_and_prints_notes(exp):
    done = run("check", exp.yaml, "--nproc", 2)
    assert done.exit_code == 0 and done.stdout.startswith("ok: ")
    assert "note: " in done.stderr


def test_check_collects_all_problems(exp):
    done = run("check", exp.yaml, "rollout.temperature=0", "actor.ppo_mini_batch_size=60")
    assert isinstance(done.exception, UserError)
    assert len(str(done.exception).splitlines()) == 2


def test_check_for_sft(exp):
    assert isinstance(run("check", exp.yaml, "--kind", "sft").exception, UserError)
    assert run("check", exp.yaml, "--kind", "sft", "sft.train_files=[train.parquet]").exit_code == 0


def test_keys_lists_every_key():
    done = run("keys")
    assert done.exit_code == 0
    assert [row.name for row in iter_keys() if row.name not in done.stdout] == []
    assert len(rich_table(80).columns) == 3 and len(rich_table(160).columns) == 4
    assert run("keys", "--markdown").stdout == markdown()


def test_import_verl_prints_or_writes(exp):
    source = exp.root / "verl.yaml"
    source.write_text("data: {train_batch_size: 8}\nfoo: {bar: 1}\n")
    done = run("import-verl", source, "+data.shuffle=False")
    assert done.exit_code == 0 and "train_batch_size: 8" in done.stdout and "shuffle: false" in done.stdout
    assert "warning: foo.bar = 1: dropped" in done.stderr
    target = exp.root / "out.yaml"
    assert run("import-verl", "data.train_batch_size=4", "-o", target).exit_code == 0
    assert "train_batch_size: 4" in target.read_text()
    assert "lam: 1.0" in run("import-verl", "data.train_batch_size=4", "--verl-defaults").stdout


@pytest.mark.parametrize("words", [[], ["no_such_file.yaml"], ["a.b=1", "-o", "no/such/folder.yaml"]])
def test_import_verl_explains_mistakes(exp, words):
    assert isinstance(run("import-verl", *words).exception, UserError)
