"""`python -m trl_opd.run_sft --config recipe.yaml`, and what `accelerate launch -m` starts."""

import sys

if __name__ == "__main__":
    from trl_opd.launch import main

    sys.exit(main("sft", sys.argv[1:]))
