// The Markdown that models write: headings, lists, code, bold, italics. Text becomes text nodes, never HTML.

const INLINE = /`([^`\n]+)`|\*\*(?=\S)([^*\n]+?)\*\*|\*(?=\S)([^*\n]+?)\*/g;

function appendInline(parent, text) {
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(last, match.index));
    const [, code, bold, italic] = match;
    const made = document.createElement(code !== undefined ? "code" : bold !== undefined ? "strong" : "em");
    made.textContent = code ?? bold ?? italic;
    parent.append(made);
    last = match.index + match[0].length;
  }
  parent.append(text.slice(last));
}

function make(name, text) {
  const made = document.createElement(name);
  appendInline(made, text);
  return made;
}

/** Blocks of a text: {kind: "code" | "heading" | "list" | "paragraph", lines, ordered, start}. */
export function parseBlocks(text) {
  const blocks = [];
  let open = null; // the block that the next line may belong to
  let fence = null;
  for (const line of text.split("\n")) {
    const mark = line.match(/^\s*(```+|~~~+)/);
    if (fence !== null) {
      if (mark && mark[1].startsWith(fence)) fence = null;
      else open.lines.push(line);
      if (fence === null) open = null;
      continue;
    }
    if (mark) {
      fence = mark[1];
      blocks.push((open = { kind: "code", lines: [] }));
      continue;
    }
    const heading = line.match(/^#{1,6}\s+(.*)/);
    const item = line.match(/^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)/);
    if (!line.trim()) {
      open = null;
    } else if (heading) {
      blocks.push({ kind: "heading", lines: [heading[1]] });
      open = null;
    } else if (item) {
      const ordered = item[1] !== undefined;
      // Items may stand apart by blank lines.
      const before = blocks.at(-1);
      if (before?.kind === "list" && before.ordered === ordered) open = before;
      else blocks.push((open = { kind: "list", ordered, start: Number(item[1] ?? 1), lines: [] }));
      open.lines.push(item[2]);
    } else if (open?.kind === "list") {
      open.lines[open.lines.length - 1] += "\n" + line.trim();
    } else if (open?.kind === "paragraph") {
      open.lines.push(line);
    } else {
      blocks.push((open = { kind: "paragraph", lines: [line] }));
    }
  }
  return blocks;
}

function renderBlock(block) {
  if (block.kind === "code") {
    const pre = document.createElement("pre"), code = document.createElement("code");
    pre.tabIndex = 0; // it may scroll sideways
    code.textContent = block.lines.join("\n");
    pre.append(code);
    return pre;
  }
  if (block.kind === "list") {
    const list = document.createElement(block.ordered ? "ol" : "ul");
    if (block.ordered) list.start = block.start;
    list.append(...block.lines.map((line) => make("li", line)));
    return list;
  }
  const made = document.createElement(block.kind === "heading" ? "h3" : "p");
  block.lines.forEach((line, i) => {
    if (i) made.append(document.createElement("br"));
    appendInline(made, line);
  });
  return made;
}

/** Show a text in an element. Blocks that are there already and stay as they are are not touched, so a selection survives. */
export function renderMarkdown(parent, text) {
  const blocks = parseBlocks(text);
  blocks.forEach((block, i) => {
    const key = JSON.stringify(block), old = parent.children[i];
    if (old?.markdownKey === key) return;
    const made = renderBlock(block);
    made.markdownKey = key;
    if (old) old.replaceWith(made);
    else parent.append(made);
  });
  while (parent.children.length > blocks.length) parent.lastElementChild.remove();
}
