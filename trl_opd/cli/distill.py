"""`trl-opd distill`."""


def main(argv: list[str]) -> int:
    from trl_opd.run import main as run

    return run("distill", argv)
