/* One episode as a transcript. All text becomes text nodes: nothing that a model or an environment wrote is ever markup. */

function element(tag, name, ...inside) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.append(...inside.filter((one) => one !== null && one !== undefined && one !== ""));
  return node;
}

function pair(list, label, node) {
  list.append(element("dt", "", label), element("dd", "", node));
}

function textOf(text, name) {
  return element("span", name ? `text ${name}` : "text", text);
}

/* An action that is JSON, such as a tool call, is set out. */
function actionOf(text) {
  let shown = text;
  if (/^\s*[[{]/.test(text)) {
    try { shown = JSON.stringify(JSON.parse(text), null, 1); } catch { shown = text; }
  }
  return textOf(shown, "action");
}

function tokensOf(tokens, taught) {
  const name = taught === true ? "tokens taught text" : "tokens text";
  return element("span", name, ...tokens.map((token) => element("span", "", token)));
}

function taughtNote(turn) {
  const how = { true: "trained on", false: "not trained on", null: "whether trained on is not stored" }[String(turn.trained)];
  return `${turn.n_tokens} tokens of the reply ${how}; ${turn.prompt} of the prompt not trained on`;
}

function happened(turn, asTokens) {
  const list = element("dl", "said");
  if (asTokens && turn.tokens.length) pair(list, taughtNote(turn), tokensOf(turn.tokens, turn.trained));
  else if (turn.malformed) pair(list, "unreadable reply", textOf(turn.text));
  else {
    if (turn.thought) pair(list, "thought", textOf(turn.thought));
    pair(list, turn.part[1] > 1 ? `part ${turn.part[0]} of ${turn.part[1]} of a reply` : "action", actionOf(turn.action));
    if (asTokens) pair(list, "tokens", textOf(taughtNote(turn)));
  }
  if (turn.differs) {
    const quoted = (tokens) => (tokens || []).join("|") || "nothing";
    const said = `at token ${turn.differs.position}, produced ${quoted(turn.differs.produced)}, rendered ${quoted(turn.differs.rendered)}`;
    pair(list, "tokens differ in the next state", textOf(said, "no"));
  }
  if (turn.part[0] === turn.part[1]) pair(list, "observation", textOf(turn.observation));
  if (turn.reward || turn.end) pair(list, "reward", textOf(`${short(turn.reward)} ${turn.end}`.trim()));
  return list;
}

function judged(judgement, wrong) {
  const card = element("div", judgement.wrong ? "card wrong" : "card");
  card.append(element("div", "label", `${judgement.by} judged ${judgement.taken ? "this action" : "another action"}`));
  if (!judgement.taken) card.append(element("div", "", actionOf(judgement.action)));
  for (const future of judgement.futures) card.append(element("div", "", textOf(future)));
  card.append(element("div", "", textOf(judgement.critique || judgement.verdict, { yes: "yes", no: "no" }[judgement.verdict] || "")));
  if (judgement.refined) card.append(element("div", "", element("span", "label", "rewritten to: "), actionOf(judgement.refined)));
  for (const note of judgement.notes) card.append(element("div", "label", note));
  if (judgement.wrong) card.append(element("div", "no", `Critic and outcome disagree: it ${wrong[judgement.wrong]}.`));
  return card;
}

function targeted(target, asTokens) {
  const tokens = asTokens && target.tokens.length;
  const label = tokens
    ? `${target.by}: target of the ${target.role}; ${target.tokens.length} tokens to be learned, its prompt of ${target.prompt} not`
    : `${target.by}: target of the ${target.role}`;
  const weight = target.weight === 1 ? "" : `, weight ${short(target.weight)}`;
  return element("div", "card", element("div", "label", label + weight), tokens ? tokensOf(target.tokens, true) : textOf(target.completion));
}

/* V of the state before the turn and what the turn earned, where it is stored. */
function numbers(episode, turn) {
  const known = [];
  const value = turn.credit ? turn.credit.value : episode.values[turn.turn];
  if (value !== null && value !== undefined) known.push(`V ${short(value)}`);
  if (turn.credit && turn.credit.advantage !== null) known.push(`advantage ${short(turn.credit.advantage)}`);
  if (turn.credit && turn.credit.target !== null) known.push(`target ${short(turn.credit.target)}`);
  if (turn.credit) known.push(`share of the loss ${short(turn.credit.share)}${turn.credit.clipped ? ", clipped" : ""}`);
  return known;
}

function turnNode(episode, turn, asTokens, wrong) {
  const beside = [...turn.judgements.map((one) => judged(one, wrong)), ...turn.targets.map((one) => targeted(one, asTokens))];
  const node = element("section", beside.length ? "turn" : "turn plain");
  const head = element("h4", "", `turn ${turn.turn} `);
  for (const told of numbers(episode, turn)) head.append(element("span", "tag", told));
  node.append(head, happened(turn, asTokens));
  if (beside.length) node.append(element("div", "", ...beside));
  return node;
}

function transcript(episode, link, asTokens, wrong, letters) {
  const node = element("article", "");
  const anchor = element("a", "", episode.id);
  anchor.href = link;
  node.setAttribute("aria-label", `Episode ${episode.id}`);
  node.append(element("h3", "", letters > 1 ? `${episode.run}: ` : "", `${episode.by}, episode `, anchor));
  const result = episode.outcome === "scored" ? episode.result : `${episode.result} (${episode.outcome})`;
  const facts = element("p", "facts", `scenario ${episode.scenario}, ${episode.split}. `, element("span", episode.result, result));
  facts.append(`, reward ${short(episode.reward)}, ${episode.turns.length} turns. `);
  if (episode.values.length) facts.append(`V ${episode.values.map(short).join(", ")}.`);
  node.append(facts);
  const opening = element("details", "", element("summary", "", "What the policy was told first"));
  opening.open = episode.opening.reduce((n, one) => n + one.content.length, 0) < 600;
  const said = element("dl", "said");
  for (const message of episode.opening) pair(said, message.role, textOf(message.content));
  opening.append(said);
  node.append(opening, ...episode.turns.map((turn) => turnNode(episode, turn, asTokens, wrong)));
  if (episode.error) node.append(element("p", "no text", `error: ${episode.error}`));
  return node;
}
