"""The web page in a real browser, against a server whose answers are known. Skipped where there is no Chromium."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer, serving

from jaxllm.core.types import PrefixCacheStats, SchedulerStats
from jaxllm.engine.metrics import Counter, EngineMetrics, Histogram, IterationStats

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright_api.expect
expect.set_options(timeout=20_000)  # a busy machine

STATIC = Path(__file__).parents[2] / "jaxllm" / "serve" / "static"
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found (Debian: apt-get install chromium)")

ANSWER = [
    "The **capital** of ",
    "France is *Paris*.\n\n",
    "1. one\n",
    "2. `two`\n\n",
    "```python\nprint(1)\n",
    "# **no**\n```\n",
    "<b>x</b>",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        # The sandbox of Chromium does not work for root, as which tests often run in containers.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer(models=[{"id": "tiny"}], static=STATIC)) as server:
        yield server


@pytest.fixture
def open_page(browser: Any, server: FakeServer) -> Iterator[Callable[..., Any]]:
    """Opens the page. At the end nobody else has been asked, and nothing was complained of."""
    asked: list[str] = []
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_(**options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        # The browser itself reports answers that are not 200.
        page.on("console", lambda message: complaints.append(message.text) if "Failed to load" not in message.text else None)
        page.goto(server.url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith(server.url + "/")] == []
    assert complaints == []


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finished(page: Any) -> Any:
    """The last answer, once it is complete."""
    last = page.locator(".turn.assistant").last
    expect(last.get_by_role("button", name="Retry")).to_be_visible()
    return last


def chats(server: FakeServer) -> list[dict[str, Any]]:
    return [body for path, _, body in server.seen if path == "/v1/chat/completions"]


def wait_until(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.02)


# Time as the chat sees it: 100 ms more whenever it looks, however busy the machine is.
CHAT_CLOCK = """() => {
    const now = performance.now.bind(performance);
    let looked = 0;
    performance.now = () => (new Error().stack.includes("/app.js") ? 100 * looked++ : now());
}"""


def test_an_answer(open_page: Callable[..., Any], server: FakeServer) -> None:
    server.answer, server.ttft, server.itl = ANSWER, 0.05, 0.02
    page = open_page()
    page.evaluate(CHAT_CLOCK)
    expect(page.get_by_label("Model")).to_have_text("tiny")
    ask(page, "What is the <i>capital</i>?")
    turn = finished(page)
    expect(page.locator(".turn.user")).to_have_text("What is the <i>capital</i>?")
    answer = turn.locator(".answer")
    assert answer.locator("strong").all_inner_texts() == ["capital"]
    assert answer.locator("em").all_inner_texts() == ["Paris"]
    assert answer.locator("ol li").all_inner_texts() == ["one", "two"]
    assert answer.locator("pre").inner_text() == "print(1)\n# **no**"
    assert answer.locator("> p").last.inner_text() == "<b>x</b>"
    assert answer.locator("b").count() == 0
    figures = turn.locator(".meta").inner_text()
    # It looks when it sends and at each of 7 pieces: 6 tokens after the first one in 600 ms.
    assert re.search(r"4 prompt tokens\s+7 tokens\s+10\.0 tokens/s\s+first after 100 ms\s+reached the most tokens", figures)
    (body,) = chats(server)
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is the <i>capital</i>?"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    expect(page.locator("#announce")).to_contain_text("Answer reached the most tokens: The **capital**")


def test_the_text_comes_bit_by_bit(open_page: Callable[..., Any], server: FakeServer) -> None:
    server.itl, server.piece = 0.1, 7
    server.answer = [f"w{i} " for i in range(8)]
    page = open_page()
    page.evaluate(
        """() => {
            window.lengths = [];
            new MutationObserver(() => lengths.push(document.querySelector(".answer")?.textContent.length ?? 0))
                .observe(document.getElementById("log"), { childList: true, subtree: true, characterData: true });
        }"""
    )
    ask(page, "Count.")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(finished(page).locator(".answer")).to_have_text("w0 w1 w2 w3 w4 w5 w6 w7")
    lengths = page.evaluate("lengths")
    assert len(set(lengths)) >= 4
    assert lengths == sorted(lengths)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_a_conversation_with_settings(open_page: Callable[..., Any], server: FakeServer) -> None:
    server.answer = ["Hello."]
    page = open_page()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature", exact=True).fill("0.5")
    page.get_by_label("Top-p, slider").fill("0.9")
    page.get_by_label("Most tokens of an answer").fill("7")
    page.get_by_label("Seed").fill("3")
    ask(page, "Hi")
    finished(page)
    ask(page, "And\nnow?")
    finished(page)
    first, second = chats(server)
    assert {name: first[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": 3,
    }
    system = {"role": "system", "content": "Be brief."}
    assert first["messages"] == [system, {"role": "user", "content": "Hi"}]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And\nnow?"},
    ]
    # They are kept, and can be given up.
    page.reload()
    assert page.get_by_label("Temperature", exact=True).input_value() == "0.5"
    page.get_by_role("button", name="Reset").click()
    ask(page, "Hi")
    finished(page)
    assert set(chats(server)[-1]) == {"model", "messages", "stream", "stream_options"}
    assert chats(server)[-1]["messages"] == [{"role": "user", "content": "Hi"}]


def test_settings_out_of_range_are_not_sent(open_page: Callable[..., Any], server: FakeServer) -> None:
    page = open_page()
    page.get_by_label("Temperature", exact=True).fill("-1")
    ask(page, "Hi")
    expect(page.locator("#temperature")).to_be_focused()
    assert page.get_by_label("Message", exact=True).input_value() == "Hi"
    assert chats(server) == []


def test_stop(open_page: Callable[..., Any], server: FakeServer) -> None:
    server.answer = [f"w{i} " for i in range(1000)]
    server.itl = 0.02
    page = open_page()
    ask(page, "Go on and on.")
    expect(page.locator(".answer")).to_contain_text("w3")
    page.get_by_role("button", name="Stop").click()
    turn = finished(page)
    expect(turn.locator(".meta")).to_contain_text("stopped")
    text = turn.locator(".answer").inner_text()
    assert text.startswith("w0 w1 w2 w3")
    assert "w999" not in text
    # The server learns of it, and what was said so far counts.
    wait_until(lambda: server.running == 0)
    server.answer = ["Enough."]
    ask(page, "Thanks")
    finished(page)
    assert chats(server)[-1]["messages"][1]["role"] == "assistant"
    assert chats(server)[-1]["messages"][1]["content"].strip() == text


def test_retry_and_new_chat(open_page: Callable[..., Any], server: FakeServer) -> None:
    server.answer = ["First."]
    page = open_page()
    page.get_by_role("button", name="Write a haiku about autumn.").click()
    turn = finished(page)
    server.answer = ["Second."]
    turn.get_by_role("button", name="Retry").click()
    expect(page.locator(".answer")).to_have_text("Second.")
    finished(page)
    assert chats(server)[0] == chats(server)[1]
    server.answer, server.itl = ["w "] * 1000, 0.02
    ask(page, "Long")
    expect(page.locator(".answer").last).to_contain_text("w w w")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_text("Ask the model something.")).to_be_visible()
    wait_until(lambda: server.running == 0)
    server.answer = ["New."]
    ask(page, "Again")
    finished(page)
    assert chats(server)[-1]["messages"] == [{"role": "user", "content": "Again"}]


def test_thinking_is_folded_away_at_the_end(open_page: Callable[..., Any], server: FakeServer) -> None:
    server.reasoning, server.answer = "Let me see.", ["Paris."]
    page = open_page()
    ask(page, "?")
    turn = finished(page)
    assert turn.locator("details").get_attribute("open") is None
    assert turn.locator("details pre").text_content() == "Let me see."
    assert turn.locator(".answer").inner_text() == "Paris."
    assert "2 tokens" not in turn.locator(".meta").inner_text()


def test_a_server_that_does_not_count(open_page: Callable[..., Any], server: FakeServer) -> None:
    server.usage, server.answer = False, ["a ", "b ", "c "]
    page = open_page()
    # It counts in each chunk only if it is asked to, which this one ignores.
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=_without_usage(route.request.post_data)))
    ask(page, "?")
    figures = finished(page).locator(".meta").inner_text()
    assert figures.startswith("3 tokens")
    assert "prompt" not in figures


def _without_usage(body: str) -> str:
    return re.sub(r'"stream_options":\{[^}]*\}', '"stream_options":{}', body)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"status": 400}, "400 Bad Request: the fake server refuses"),
        ({"broken_after": 2}, "the fake engine died"),
        ({"drop_after": 2}, "The connection to the server broke."),
    ],
)
def test_errors_are_shown(open_page: Callable[..., Any], server: FakeServer, fault: dict[str, int], message: str) -> None:
    page = open_page()
    server.itl = 0.1  # so that the browser sees the chunks before the end
    for name, value in fault.items():
        setattr(server, name, value)
    ask(page, "first")
    turn = finished(page)
    expect(turn.get_by_role("alert")).to_have_text(message)
    # The next question is asked without the one that failed, unless a part of the answer came.
    for name, default in (("status", 200), ("broken_after", None), ("drop_after", None)):
        setattr(server, name, default)
    ask(page, "second")
    expect(page.locator(".turn.assistant")).to_have_count(2)
    finished(page)
    messages = [message["content"] for message in chats(server)[-1]["messages"]]
    assert messages == (["second"] if "status" in fault else ["first", " alpha beta", "second"])


def test_an_api_key(open_page: Callable[..., Any], server: FakeServer) -> None:
    server.api_key = "secret"
    page = open_page()
    expect(page.get_by_role("textbox", name="API key")).to_be_focused()
    expect(page.get_by_label("Model")).to_have_text("needs an API key")
    page.get_by_role("textbox", name="API key").fill("secret")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Model")).to_have_text("tiny")
    server.answer = ["Hello."]
    ask(page, "Hi")
    expect(finished(page).locator(".answer")).to_have_text("Hello.")
    # It is not written down anywhere.
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_several_models(open_page: Callable[..., Any], server: FakeServer) -> None:
    server.models = [{"id": "one"}, {"id": "two"}]
    page = open_page()
    page.get_by_label("Model").select_option("two")
    ask(page, "Hi")
    finished(page)
    assert chats(server)[-1]["model"] == "two"


def prometheus(metrics: EngineMetrics, prefix: str = "jaxllm:") -> str:
    """As a server publishes them, for one engine."""
    lines = []
    for metric in metrics.snapshot():
        name = prefix + metric.name.removeprefix("jaxllm:")
        labels = ",".join(
            f'{key}="{value}"' for key, value in {"engine": "0", "model_name": 'a "b" {c}', **metric.labels}.items()
        )
        if isinstance(metric, Histogram):
            lines += [f"{name}_sum{{{labels}}} {metric.sum}", f"{name}_count{{{labels}}} {float(metric.count)}"]
        else:
            total = "_total" if isinstance(metric, Counter) and not name.endswith("_total") else ""
            lines += [f"# HELP {name} {metric.documentation}", f"{name}{total}{{{labels}}} {float(metric.value)}"]
    return "\n".join(lines) + "\n"


def card(page: Any, title: str) -> Any:
    return page.locator("figure.card", has=page.get_by_role("heading", name=title, exact=True))


@pytest.mark.parametrize("prefix", ["jaxllm:", "vllm:"])
def test_the_engine(open_page: Callable[..., Any], server: FakeServer, prefix: str) -> None:
    """The engine's own metrics: their names are those that the page reads."""
    metrics = EngineMetrics(max_model_len=1024)

    def step() -> str:
        """A look's worth of work: 3 first tokens after 0.2 s each, 50 more after 0.02 s each."""
        iteration = IterationStats(0.0, num_prompt_tokens=60, num_generation_tokens=53)
        iteration.times_to_first_token = [0.2] * 3
        iteration.inter_token_latencies = [0.02] * 50
        stats = SchedulerStats(num_running_reqs=5, num_waiting_reqs=2, kv_cache_usage=0.25)
        stats.prefix_cache_stats = PrefixCacheStats(queries=60, hits=15)
        metrics.record(stats, iteration)
        return prometheus(metrics, prefix) + prefix + 'cache_config_info{block_size="32",num_gpu_blocks="400"} 1.0\n'

    server.metrics = step
    page = open_page()
    expect(page.get_by_role("status").filter(has_text="ready")).to_be_visible()
    expect(card(page, "Requests").locator(".values")).to_have_text("5running2waiting")
    expect(card(page, "KV blocks in use").locator(".values")).to_have_text("25 %100 of 400")
    expect(card(page, "Prefix cache hits").locator(".values")).to_have_text("25 %")
    expect(card(page, "Time to first token").locator(".values")).to_have_text("200 ms")
    expect(card(page, "Inter-token latency").locator(".values")).to_have_text("20 ms")
    rates = card(page, "Tokens/s").locator("b").all_inner_texts()
    out, inward = (float(rate.replace(",", "")) for rate in rates)
    assert 0 < out <= 53 * 10
    assert inward / out == pytest.approx(60 / 53, rel=0.05)
    expect(card(page, "Requests").get_by_role("img")).to_have_attribute("aria-label", "Requests: 5 running, 2 waiting")
    expect(card(page, "Requests").locator("polyline")).to_have_count(2)
    expect(page.locator("#totals")).to_contain_text("From the prefix cache25.0 %")
    # The value under the pointer: at the left there was no look yet.
    card(page, "Requests").get_by_role("img").hover(position={"x": 1, "y": 5})
    expect(card(page, "Requests").locator(".values")).to_have_text("–running–waiting")
    expect(card(page, "Requests").locator(".scale")).to_contain_text("s ago")


def test_engines_that_keep_no_statistics_or_go_away(open_page: Callable[..., Any], server: FakeServer) -> None:
    page = open_page()
    expect(page.locator("#engine-note")).to_have_text("The server shows no metrics.")
    server.metrics = lambda: "jaxllm:server_load 0.0\n"
    expect(page.locator("#engine-note")).to_have_text("The engine keeps no statistics.")
    server.healthy = False
    expect(page.locator("#health")).to_have_attribute("data-state", "down")
    expect(page.locator("#health")).to_contain_text("engine is down")
    server.healthy = True
    server.metrics = lambda: prometheus(EngineMetrics(64))
    expect(page.locator("#health")).to_have_attribute("data-state", "up")
    expect(page.locator("#engine-note")).to_be_hidden()


def test_numbers_of_several_engines_and_restarts(open_page: Callable[..., Any]) -> None:
    page = open_page()
    found = page.evaluate(
        """async () => {
            const { parseMetrics, readNumbers, between } = await import("/engine.js");
            const text = (running, usage, tokens) => `
                # TYPE jaxllm:num_requests_running gauge
                jaxllm:num_requests_running{engine="0"} ${running}
                jaxllm:num_requests_running{engine="1"} 1
                jaxllm:kv_cache_usage_perc{engine="0"} ${usage}
                jaxllm:kv_cache_usage_perc{engine="1"} 0.5
                jaxllm:generation_tokens_total{engine="0"} ${tokens}
                other:generation_tokens_total 1000000
            `.replaceAll(/^ +/gm, "");
            const looks = [[2, 0.1, 100], [3, 0.3, 160], [1, 0, 5]];
            const [a, b, c] = looks.map((values) => readNumbers(parseMetrics(text(...values))));
            return [between(null, a, 1), between(a, b, 2), between(b, c, 1)];
        }"""
    )
    nothing = {"hitRate": None, "ttft": None, "itl": None}
    assert found[0] == {"running": 3, "waiting": 0, "usage": pytest.approx(30), "generated": None, "prompt": None, **nothing}
    assert found[1] == {"running": 4, "waiting": 0, "usage": pytest.approx(40), "generated": 30, "prompt": 0, **nothing}
    assert found[2]["generated"] is None


def test_blocks_of_markdown(open_page: Callable[..., Any]) -> None:
    page = open_page()
    text = "# T\na\nb\n\n- x\n  y\n\n- z\n1) one\n\n~~~~\n```\n\n~~~~\n* s\n```js\nopen"
    blocks = page.evaluate("""async (text) => (await import("/markdown.js")).parseBlocks(text)""", text)
    assert [(block["kind"], block["lines"]) for block in blocks] == [
        ("heading", ["T"]),
        ("paragraph", ["a", "b"]),
        ("list", ["x\ny", "z"]),
        ("list", ["one"]),
        ("code", ["```", ""]),
        ("list", ["s"]),
        ("code", ["open"]),
    ]


def test_at_the_width_of_a_phone(open_page: Callable[..., Any], server: FakeServer) -> None:
    server.answer = ["A" * 300 + " ", "\n```\n" + "B" * 300 + "\n```\n"]
    page = open_page(viewport={"width": 360, "height": 640}, has_touch=True)
    ask(page, "W" * 200)
    finished(page)
    parts = {"Chat": "#chat", "Engine": "#engine", "Settings": "#settings"}
    for name in parts:
        button = page.get_by_role("button", name=name, exact=True)
        button.tap()
        assert button.get_attribute("aria-pressed") == "true"
        assert [other for other, part in parts.items() if page.locator(part).is_visible()] == [name]
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    # Asking leads back to the chat, and the message box stays in sight.
    page.get_by_role("button", name="Chat", exact=True).tap()
    box = page.get_by_role("button", name="Send").bounding_box()
    assert box["y"] + box["height"] <= 640


def luminance(color: str) -> float:
    """Relative luminance of "rgb(r, g, b)", by WCAG 2.2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours(open_page: Callable[..., Any], scheme: str) -> None:
    """As the system has them, unless one is chosen; text has a contrast of at least 4.5 (WCAG AA)."""
    page = open_page(color_scheme=scheme)

    def back() -> float:
        return luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert (back() > 0.5) == (scheme == "light")
    colors = page.evaluate(
        """() => {
            const probe = document.body.appendChild(document.createElement("i"));
            const color = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
            const names = ["back", "panel", "raised", "user", "text", "dim", "accent", "on-accent", "bad", "bad-back"];
            return Object.fromEntries(names.map((name) => [name, color(name)]));
        }"""
    )
    pairs = [("text", "back"), ("text", "panel"), ("text", "raised"), ("text", "user"), ("dim", "back"), ("dim", "panel")]
    for front, behind in [*pairs, ("on-accent", "accent"), ("bad", "bad-back")]:
        low, high = sorted(luminance(colors[name]) for name in (front, behind))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (front, behind)
    button = page.get_by_role("button", name="Colours")
    button.click()
    assert back() > 0.5
    button.click()
    assert back() < 0.5
    page.reload()
    assert back() < 0.5
    button.click()
    assert (back() > 0.5) == (scheme == "light")
