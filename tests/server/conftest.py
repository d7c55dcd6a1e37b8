import pytest

from tests.server import live


@pytest.fixture(scope="session")
def llm(root):
    return live.llm(root)


@pytest.fixture(scope="session")
def server(llm):
    """A server that all tests of a process share."""
    with live.running(
        llm, shows_stats=True, tool_parser="hermes", has_dev_endpoints=True
    ) as shared:
        yield shared


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client
