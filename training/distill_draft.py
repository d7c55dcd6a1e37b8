"""Short form of ``python -m training.distill draft``."""

import functools

from training import distill
from training.util.command import end

main = functools.partial(distill.run_method, "draft", module="training.distill_draft")

if __name__ == "__main__":
    end(main())
