"""`trl-opd distill`."""


def main(argv: list[str]) -> int:
    from trl_opd.launch import main as launch

    return launch("distill", argv)
