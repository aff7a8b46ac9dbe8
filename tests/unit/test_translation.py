"""Every message and every help text has a Chinese translation, and every translation belongs to one of them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest
import typer
from conftest import Command
from pydantic_core._pydantic_core import list_all_errors
from typer import rich_utils

import zhixing
from zhixing import translation
from zhixing.cli import app
from zhixing.cli.translated_help import LABELS, help_texts, paragraphs
from zhixing.errors import UserError, note, unknown
from zhixing.translation import CATALOGS, language, read_catalog, read_pairs, split_template, translate

ROOT = Path(zhixing.__file__).parent
# calls whose first argument is a message
SHOWN = {"UserError", "NonFiniteError", "MisbehaviorError", "note", "write_stderr"}
# texts that the code puts together from parts, and those of typer and pydantic: not found as a whole in the source
COMPOSED, LIBRARIES = CATALOGS / "composed.txt", CATALOGS / "libraries.txt"


@pytest.fixture
def chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZHIXING_LANG", "zh")


# --- the messages in the source ---


def templates(node: ast.AST) -> list[str]:
    """Return the templates of an expression: several if it chooses between texts, `{}` if it isn't a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value.replace("{", "{{").replace("}", "}}")]
    if isinstance(node, ast.JoinedStr):
        return ["".join("{}" if isinstance(part, ast.FormattedValue) else templates(part)[0] for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in templates(node.left) for right in templates(node.right)]
    if isinstance(node, ast.IfExp):
        return [*templates(node.body), *templates(node.orelse)]
    return ["{}"]


def is_text(template: str) -> bool:
    """Return whether a template has words of its own."""
    return re.search(r"[a-z]{2}", template.replace("{}", "")) is not None


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the package and the syntax tree of each file."""
    for file in sorted(ROOT.rglob("*.py")):
        package = file.relative_to(ROOT).parts[0].removesuffix(".py")
        yield package, ast.parse(file.read_text(encoding="utf-8"))


def messages() -> dict[str, set[str]]:
    """Return the templates of all messages by package."""
    found: dict[str, set[str]] = {}
    for package, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                owner, _, name = ast.unparse(node.func).rpartition(".")
                # a `ValueError` of settings becomes a message, too
                is_setting = name == "ValueError" and package in ("algorithms", "config")
                if name in SHOWN or is_setting or (name == "append" and owner.endswith("notices")):
                    found.setdefault(package, set()).update(filter(is_text, templates(node.args[0])))
    return found


def texts() -> set[str]:
    """Return all texts of the source, also without the punctuation around them, and the paragraphs of docstrings."""
    found = {text for _, tree in sources() for node in ast.walk(tree) for text in templates(node)}
    return found | {text.strip(" ,;()") for text in found} | {part for text in found for part in paragraphs(text)}


def optional_placeholders() -> set[tuple[str, int]]:
    """Return the placeholders that choose between texts, such as `is` and `are`: a translation may not need them."""
    found = set()
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                values = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
                found |= {(templates(node)[0], i) for i, value in enumerate(values) if isinstance(value, ast.IfExp)}
    return found


def pairs() -> list[tuple[str, str]]:
    return [pair for file in sorted(CATALOGS.glob("*.txt")) for pair in read_pairs(file)]


def words(*files: Path) -> str:
    """Return the text between the placeholders in catalogs."""
    return "\n".join(part for file in files for english, _ in read_pairs(file) for part in split_template(english))


# --- the catalogs ---


def test_every_message_is_translated() -> None:
    found = messages()
    known = {english for english, _ in pairs()}
    missing = {package: sorted(templates - known) for package, templates in found.items() if templates - known}
    assert missing == {}  # add the English and the Chinese line to zhixing/locale/zh/PACKAGE.txt
    assert sum(map(len, found.values())) > 500


def test_every_help_text_is_translated() -> None:
    group = typer.main.get_command(app)
    assert len(group.commands) > 15  # type: ignore[attr-defined]
    found = [text for part, field in help_texts(group) for text in paragraphs(getattr(part, field))]
    assert len(found) > 150
    labels = [getattr(rich_utils, label) for label in LABELS]
    known = {english for english, _ in pairs()}
    assert [text for text in [*found, *labels] if text not in known] == []


def test_every_translation_belongs_to_a_text() -> None:
    in_source = texts()
    files = set(CATALOGS.glob("*.txt")) - {COMPOSED, LIBRARIES}
    stale = [english for file in files for english, _ in read_pairs(file) if english not in in_source]
    assert stale == []  # remove them, or follow the change of the message
    assert [english for english, count in Counter(english for english, _ in pairs()).items() if count > 1] == []


def test_parts_of_composed_messages_are_in_the_source() -> None:
    in_source = " ".join(texts())
    assert [word for word in re.findall(r"[\w.-]+", words(COMPOSED)) if word not in in_source] == []


def test_texts_of_libraries_exist() -> None:
    folder = Path(typer.__file__).parent
    corpus = "\n".join(file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))
    corpus += "\n".join(error["message_template_python"] for error in list_all_errors())
    unknown_words = {word for word in re.findall(r"[A-Za-z]{2,}", words(LIBRARIES)) if word not in corpus}
    assert unknown_words == set()


def test_translations_have_the_placeholders_of_the_messages() -> None:
    optional = optional_placeholders()
    for english, chinese in pairs():
        count = len(split_template(english)) - 1
        fields = [field for _, field, _, _ in Formatter().parse(chinese) if field is not None]
        used = set(range(len(fields))) if all(field == "" for field in fields) else {int(field) for field in fields}
        dropped = {i for i in set(range(count)) - used if (english, i) not in optional}
        assert not dropped, english
        assert used <= set(range(count)), english
        assert re.search(r"[\u4e00-\u9fff]", chinese) or not re.search(r"[a-z]{2} [a-z]{2}", english), english


@pytest.mark.usefixtures("chinese")
def test_each_message_gets_its_own_translation() -> None:
    """Another template that fits the same message must not take precedence."""
    for english, chinese in pairs():
        values = [f"v{i}" for i in range(len(split_template(english)) - 1)]
        assert translate(english.format(*values).strip()) == chinese.format(*values).strip()


# --- the language ---


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "en"),
        ({"LANG": "C.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LC_MESSAGES": "zh_CN.UTF-8", "LANG": "en_US.UTF-8"}, "zh"),
        ({"LC_ALL": "en_US.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LC_ALL": "", "LANG": "zh_CN.UTF-8"}, "zh"),
        ({"ZHIXING_LANG": "en", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"ZHIXING_LANG": "zh", "LC_ALL": "C"}, "zh"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
    ],
)
def test_language_follows_the_variable_and_then_the_locale(environ: dict[str, str], expected: str) -> None:
    assert language(environ) == expected


def test_unknown_language_is_rejected(run_cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZHIXING_LANG", "fr")
    expected = "error: ZHIXING_LANG='fr': allowed are en and zh; without it, the locale determines the language\n"
    assert run_cli("list") == (2, "", expected)


def test_english_reads_no_catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(translation, "CATALOGS", tmp_path / "missing")
    read_catalog.cache_clear()
    assert str(unknown("setting", "lrr", ["lr"])) == "unknown setting 'lrr': did you mean 'lr'?"
    assert read_catalog.cache_info().currsize == 0


# --- messages ---


@pytest.mark.usefixtures("chinese")
def test_errors_are_chinese_in_python() -> None:
    error = unknown("setting", "lrr", ["lr", "lr_schedule"])
    assert str(error) == "未知的设置 'lrr'：是否想写 'lr'？"
    assert error.args == ("unknown setting 'lrr': did you mean 'lr'?",)
    with pytest.raises(
        UserError, match="未知的算法 'pppo'：是否想写 'ppo'、'ippo' 或 'mappo'？（见 `zhixing list algor"
    ):
        zhixing.config.load(algorithm="pppo", env="CartPole-v1")


@pytest.mark.usefixtures("chinese")
def test_message_inside_a_message_is_translated() -> None:
    inner = UserError("frozen=3 must be true or false")
    assert str(UserError(f"policies.red: {inner}")) == "policies.red：frozen=3 必须是 true 或 false"
    assert translate("policies.red: frozen=3 must be true or false") == "policies.red：frozen=3 必须是 true 或 false"


@pytest.mark.usefixtures("chinese")
@pytest.mark.parametrize("text", ["", "  ", "a: b; c", "{'x': 1}", "100% {} {0}", "Traceback (most recent call last):"])
def test_text_without_translation_is_unchanged(text: str) -> None:
    assert translate(text) == text


@pytest.mark.usefixtures("chinese")
def test_values_are_not_translated() -> None:
    assert translate("unknown setting 'lr {}': allowed: 未知, {0}") == "未知的设置 'lr {}'：可用的有：未知, {0}"


@pytest.mark.usefixtures("chinese")
def test_notes_are_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    note("starting 40 worker processes on 2 CPUs takes a while")
    assert capsys.readouterr().err == "提示：在 2 个 CPU 上启动 40 个工作进程需要一些时间\n"


@pytest.mark.usefixtures("chinese")
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("eval", "缺少参数 'RUN'（见 `zhixing eval --help`）"),
        ("eval nothing", "没有运行文件夹 nothing，`zhixing zoo` 中也没有这个名称的智能体"),
        ("eval --episode 3 nothing", "没有选项 --episode（可能的选项：--episodes）（见 `zhixing eval --help`）"),
        ("evall", "没有命令 'evall'。是否想写 'eval'？（见 `zhixing --help`）"),
        ("train ppo", "没有指定环境：请设置 `env`，例如 env=CartPole-v1（见 `zhixing list envs`）"),
        (
            "train ppo --env CartPole-v1 lrr=3 lr=x gamma=2 num_envs=1.5 n_steps=4 checkpoint_every=soon",
            "gamma=2: 必须小于或等于 1\ncheckpoint_every='soon': 'soon' 不是间隔；请写步数，例如 5000",
        ),
        (
            "train td3 --env CartPole-v1 env_steps=10",
            "td3 需要有界一维 Box 的连续动作，而此环境的动作空间是 Discrete(2)；请改用 ppo",
        ),
        ("resume nothing", "没有运行文件夹 nothing，`zhixing zoo` 中也没有这个名称的智能体"),
        ("sweep ppo --out runs --seeds 3", "--seeds 3 有歧义：3 个种子请写 --seeds 0-2，只用种子 3 请写 --seeds 3-3"),
        ("train qmix --env CartPole-v1", "qmix 需要有多个智能体的环境，而此环境只有一个：请使用 ppo 或 dqn"),
        ("video nothing -o clip.avi", "clip.avi 必须以 .mp4 或 .gif 结尾"),
        ("eval nothing --episodes 0", "'--episodes' 的值无效：必须大于或等于 1（见 `zhixing eval --help`）"),
        ("train ppo --env CartPole-v1 vector.backend=foo", "'envpool', 'torch' 或 'ray'"),
        ("list things", "未知的种类 'things'：可用的有：algorithms, envs, presets"),
        ("play Cart", "未知的环境 'Cart'"),
    ],
)
def test_errors_are_chinese_on_the_command_line(run_cli: Command, command: str, expected: str) -> None:
    code, _, err = run_cli(*command.split())
    assert code == 2
    assert err.startswith("错误：")
    assert expected in err


@pytest.mark.usefixtures("chinese")
@pytest.mark.parametrize("command", [[], ["eval"], ["train"], ["tune"]])
def test_help_is_chinese(run_cli: Command, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for label in (*LABELS, "highlighter"):  # restored after the test
        monkeypatch.setattr(rich_utils, label, getattr(rich_utils, label))
    code, out, _ = run_cli(*command, "--help")
    assert code == 0
    assert "─ 选项 ─" in out
    assert "显示此帮助。" in out
    assert "…" not in out  # the table folds long lines instead of cutting them
    sentences = re.findall(r"[a-z]{3,} [a-z]{3,} [a-z]{3,}", out)
    assert sentences == []
