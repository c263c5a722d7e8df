"""`python -m fshard COMMAND`."""

from .cli import main

raise SystemExit(main())
