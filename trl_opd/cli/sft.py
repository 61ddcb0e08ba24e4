"""`trl-opd sft`."""


def main(argv: list[str]) -> int:
    from trl_opd.launch import main as launch

    return launch("sft", argv)
