"""Elements of HTML reprs, for packages above: `page(title, table(rows, head=..., align=...))`, `bar`, `bars`."""

from fshard._display import Html as Html
from fshard._display import Row as Row
from fshard._display import bar as bar
from fshard._display import bars as bars
from fshard._display import page as page
from fshard._display import table as table
