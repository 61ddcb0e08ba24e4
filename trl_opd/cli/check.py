"""`trl-opd check`."""


def main(argv: list[str]) -> int:
    from trl_opd import importing

    with importing.for_good():
        from trl_opd.checks.command import main as check

    return check(argv)
