"""Short form of ``python -m training.distill eagle``."""

import functools

from training import distill
from training.util.command import end

main = functools.partial(distill.run_method, "eagle", module="training.distill_eagle")

if __name__ == "__main__":
    end(main())
