"""Chat templates of requests, rendered in a child process within bounds of time and memory.

A template of a client may loop without end. The process has Jinja's sandbox too: it reads no file.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.server.errors import RequestError

_SECONDS, _MEMORY = 10, 2 << 30
_RENDERER = """
import json, os, sys
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
task = json.load(sys.stdin)
from transformers.utils.chat_template_utils import render_jinja_template
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (task["memory"],) * 2)
except ImportError:
    pass
try:
    texts, _ = render_jinja_template(**task["arguments"])
    reply = {"text": texts[0]}
except MemoryError:
    reply = {}
except Exception as error:
    reply = {"error": " ".join(str(error).split())[:300]}
json.dump(reply, sys.stdout)
"""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    special_tokens: Mapping[str, str],
) -> str:
    """Return the text of a conversation.

    Args:
      template: Jinja.
      messages: of the conversation.
      variables: more variables of the template.
      special_tokens: texts by name, such as "bos_token".

    Raises:
      RequestError: the template fails, or takes too long.
    """
    arguments = {**special_tokens, **variables}
    arguments |= {"conversations": [list(messages)], "chat_template": template}
    task = json.dumps({"arguments": arguments, "memory": _MEMORY})
    options = dict(input=task.encode(), capture_output=True, timeout=_SECONDS, check=False)
    try:
        written = subprocess.run([sys.executable, "-c", _RENDERER], **options).stdout
        reply = json.loads(written or b"{}")
    except subprocess.TimeoutExpired:
        reply = {}
    if "text" in reply:
        return reply["text"]
    reason = reply.get("error", f"it needs more than {_SECONDS} seconds or the memory there is")
    raise RequestError(f"chat_template fails: {reason}.", status=422, param="chat_template")
