"""`python -m trl_opd.run_distill --config recipe.yaml`, and what `accelerate launch -m` starts."""

import sys

if __name__ == "__main__":
    from trl_opd.launch import main

    sys.exit(main("distill", sys.argv[1:]))
