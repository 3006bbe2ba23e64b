"""`toymha COMMAND key=value ...`: dispatch, help, completion, one-line errors.

Imports neither hydra nor torch at the top, so that help and completion answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from pathlib import Path

from toymha import config
from toymha.commands import COMMANDS, Flags
from toymha.config import GROUPS
from toymha.help import complete, help_of, overview
from toymha.schema import UserError, nearest


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 all well, 1 a run failed or diverged in a sweep, 2 a mistake, 130 or 143 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    with contextlib.suppress(AttributeError):  # Chinese text also under LC_ALL=C
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return dispatch(words)
    except UserError as e:
        print(f"toymha: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `toymha report ... | head`
        sys.stderr.close()
        return 0
    except OSError as e:  # a full disk, a folder that cannot be written
        more = "; free space, and the same command goes on" if e.errno == errno.ENOSPC else ""
        print(f"toymha: {e}{more}", file=sys.stderr)
        return 1
    except UnicodeEncodeError:
        print("toymha: this locale cannot name such files; set PYTHONUTF8=1", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("toymha: interrupted", file=sys.stderr)
        return 130


def dispatch(words: list[str]) -> int:
    if words[:1] == ["_complete"]:
        print("\n".join(complete(words[1], " ".join(words[2:]), COMMANDS)))
        return 0
    flags, rest = read_flags(words)
    name = next((w for w in rest if "=" not in w), None)
    if name is None or name == "help":
        if rest and name is None:
            raise UserError(f"{rest[0]}: a command comes first, such as `toymha train {rest[0]}`")
        print(overview(COMMANDS))
        return 0
    if name not in COMMANDS:
        raise UserError(f"no command {name}{nearest(name, COMMANDS) or ';'} commands: {', '.join(COMMANDS)}")
    rest.remove(name)
    if (second := next((w for w in rest if f"{name} {w}" in COMMANDS), None)) is not None:
        rest.remove(second)
        name = f"{name} {second}"
    seconds = [c.partition(" ")[2] for c in COMMANDS if c.startswith(f"{name} ")]
    if strange := [w for w in rest if "=" not in w and nearest(w, seconds)]:
        raise UserError(f"no command {name} {strange[0]}{nearest(strange[0], [f'{name} {s}' for s in seconds])}")
    command = COMMANDS[name]
    if flags.help:
        print(help_of(name, command, flags.config_dir))
        return 0
    return command.run(rest, flags) or 0


def read_flags(words: list[str]) -> tuple[Flags, list[str]]:
    """Flags may stand anywhere. Raises UserError for one that does not exist."""
    flags, rest, words = Flags(), [], list(words)
    while words:
        word = words.pop(0)
        if word in ("-m", "--multirun"):
            flags.multirun = True
        elif word in ("-h", "--help", "--hydra-help"):
            flags.help = True
        elif word in ("--version", "-V"):
            rest.append("version")
        elif word in ("-c", "--cfg"):
            flags.cfg = True
            if words and words[0] in ("job", "hydra", "all"):
                words.pop(0)
        elif word.partition("=")[0] in ("-cd", "--config-dir"):
            _, _, value = word.partition("=")
            value = value or (words.pop(0) if words and "=" not in words[0] else "")
            if not value:
                raise UserError(f"{word} needs a folder")
            flags.config_dir = Path(value).absolute()
            if not flags.config_dir.is_dir():
                raise UserError(f"--config-dir {value}: no such folder ({flags.config_dir})")
        elif word.startswith("-"):
            bare, _, value = word.lstrip("-").partition("=")
            value = value or (words[0] if words and not words[0].startswith("-") and "=" not in words[0] else "VALUE")
            raise UserError(f"{word}: options are written key=value{nearest_option(bare, value)}")
        else:
            rest.append(word)
    return flags, rest


def nearest_option(name: str, value: str) -> str:
    close = nearest(name.replace("-", "_"), [*GROUPS, *config.keys()])
    return close.replace("?", f"={value}?")


if __name__ == "__main__":
    sys.exit(main())
