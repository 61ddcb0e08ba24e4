"""`trl-opd sft`."""


def main(argv: list[str]) -> int:
    from trl_opd.run import main as run

    return run("sft", argv)
