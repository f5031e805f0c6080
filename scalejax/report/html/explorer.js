// The page: controls, verdict, charts, and where each number comes from. `answers` computes.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const by = (id) => document.getElementById(id);
  const GIB = 2 ** 30;

  // Numbers in words.
  const digits = (value, most = 3) => value >= 100 ? Math.round(value).toLocaleString("en")
    : String(Number(value.toPrecision(most)));
  const time = (days) => days >= 1 ? `${digits(days)} days` : days * 24 >= 1
    ? `${digits(days * 24)} hours` : days * 1440 >= 1 ? `${digits(days * 1440)} min` : `${digits(days * 86400)} s`;
  const large = (value) => {
    for (const [size, word] of [[1e12, " T"], [1e9, " billion"], [1e6, " million"]])
      if (value >= size * 0.9995) return digits(value / size) + word;
    return value >= 1 || value === 0 ? digits(value) : String(Number(value.toPrecision(2)));
  };
  const short = (value) => {
    for (const [size, word] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (value >= size * 0.9995) return digits(value / size) + word;
    return digits(value);
  };
  const dollars = (value) => "$" + large(value);
  const gib = (bytes) => `${digits(bytes / GIB)} GiB`;
  const seconds = (value) => value >= 1 ? `${digits(value)} s` : value >= 1e-3
    ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
  const percent = (share) => `${digits(share * 100)} %`;
  const whole = (value) => value.toLocaleString("en");

  // Elements.
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "path", "line", "circle", "text", "g", "rect"].includes(tag);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
      : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes))
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  const fill = (id, ...children) => by(id).replaceChildren(...children);

  // A number that says where it comes from: `say` returns {title, formula, text, sources}.
  function number(text, say) {
    return make("button", { type: "button", class: "why", onclick: () => explain(say()) }, text);
  }
  function explain(found) {
    by("why-title").textContent = found.title;
    const body = [];
    if (found.text) body.push(make("p", {}, found.text));
    if (found.formula) body.push(make("code", {}, found.formula));
    if (found.sources && found.sources.length) {
      body.push(make("p", { class: "soft" }, "Sources"));
      body.push(make("ul", {}, ...found.sources.map((each) => make("li", {}, each))));
    }
    by("why-body").replaceChildren(...body);
    by("why").showModal();
  }

  // State, which is kept in the address.
  const first = data.start;
  const MOST = { tokens: 1e18, price: 1e6, grid: 1e4 };
  let state = { ...first, prices: {}, layout: null };
  function read() {
    const given = new URLSearchParams(location.hash.slice(1));
    const one = (name, list, parse = Number) => {
      const value = parse(given.get(name));
      return given.has(name) && list.includes(value) ? value : first[name];
    };
    const rate = (name, most, otherwise) => {
      const value = Number(given.get(name));
      return given.get(name) && value >= 0 && value <= most ? value : otherwise;
    };
    const prices = {};
    for (const { name } of data.clusters) {
      const price = rate(`price.${name}`, MOST.price, null);
      if (price !== null) prices[name] = price;
    }
    state = {
      cluster: one("cluster", data.clusters.map((each) => each.name), String),
      devices: one("devices", data.devices), batch: one("batch", data.batches),
      precision: one("precision", data.dtypes, String), network: one("network", data.networks),
      framework: one("framework", data.frameworks.map((each) => each.name), String),
      tokens: tokensIn(given.get("tokens") ?? "") ?? first.tokens,
      grid: given.get("grid") === "" ? null : rate("grid", MOST.grid, first.grid),
      layout: given.get("layout"), prices,
    };
    settle();
  }
  // A layout that the setting lacks is dropped: the page answers with the best.
  function settle() {
    const names = answers.offered(answers.options(data, state).options).map((each) => each.layout);
    if (!names.includes(state.layout)) state.layout = null;
    write();
  }
  function tokensIn(text) {
    const value = answers.parseCount(text);
    return value !== null && value >= 1 && value <= MOST.tokens ? value : null;
  }
  function write() {
    const kept = new URLSearchParams();
    for (const name of ["cluster", "devices", "batch", "tokens", "precision", "network", "framework",
      "layout", "grid"])
      // An empty value is one that was removed: no CO2, if the page opens with some.
      if (state[name] !== (first[name] ?? null)) kept.set(name, state[name] ?? "");
    for (const [name, price] of Object.entries(state.prices)) kept.set(`price.${name}`, price);
    if (location.hash.slice(1) !== String(kept)) history.replaceState(null, "", `#${kept}`);
  }
  function change(values) {
    state = { ...state, ...values };
    settle();
    draw();
  }

  // Controls: made once, then filled in.
  const controls = {};
  function slider(name, title, list, words, hint) {
    const output = make("output", {}), input = make("input", { type: "range", min: 0,
      max: list.length - 1, step: 1, "aria-label": title, disabled: list.length < 2 ? "" : null,
      oninput: () => change({ [name]: list[Number(input.value)] }) });
    by("controls").append(make("label", { title: hint }, make("span", { class: "name" }, title, output), input));
    controls[name] = () => {
      input.value = list.indexOf(state[name]);
      output.textContent = words(state[name]);
      input.setAttribute("aria-valuetext", words(state[name]));
    };
  }
  function menu(name, title, choices) {
    const input = make("select", { onchange: () => change({ [name]: input.value || null }) });
    by("controls").append(make("label", {}, make("span", { class: "name" }, title), input));
    controls[name] = () => {
      input.replaceChildren(...choices().map(([value, words]) =>
        make("option", { value, ...(value === (state[name] ?? "") ? { selected: "" } : {}) }, words)));
      input.value = state[name] ?? "";
    };
  }
  // Marks an input as refused, and says why; without words, as accepted.
  function mark(input, note, words = "") {
    note.textContent = words;
    if (words) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
  function makeControls() {
    const form = by("controls");
    form.addEventListener("submit", (event) => event.preventDefault());
    menu("cluster", "Cluster", () => data.clusters.map((each) => [each.name, each.title]));
    slider("devices", "Devices", data.devices, whole, "numbers of devices of this page");
    slider("batch", "Global batch", data.batches, (value) => `${whole(value)} samples`,
      "samples per update");
    const note = () => make("span", { class: "bad note", role: "alert" });
    const range = [Math.max(0, Math.log10(first.tokens) - 2), Math.min(18, Math.log10(first.tokens) + 2)];
    const refused = note();
    const text = make("input", { type: "text", inputmode: "text", "aria-label": "Tokens, such as 300B or 15T",
      onchange: () => {
        const tokens = tokensIn(text.value);
        if (tokens !== null) change({ tokens });
        else mark(text, refused, `Refused: it must be 1 to 10^18, such as 300B, 15T or 300_000. It stays ${large(state.tokens)}.`);
      } });
    const input = make("input", { type: "range", min: range[0], max: range[1], step: 0.01,
      "aria-label": "Tokens, on a logarithm", oninput: () =>
        change({ tokens: Number((10 ** Number(input.value)).toPrecision(3)) }) });
    form.append(make("label", {}, make("span", { class: "name" }, "Tokens to train on"), text, refused, input));
    controls.tokens = () => {
      mark(text, refused);
      text.value = short(state.tokens).replaceAll(",", "");
      input.value = Math.log10(state.tokens);
      input.setAttribute("aria-valuetext", large(state.tokens));
    };
    menu("layout", "Layout", () => {
      const found = answers.offered(answers.options(data, state).options);
      const words = found.map((each) => [each.layout, `${each.layout}${each.fits ? "" : " (does not fit)"}`]);
      return [["", "best: the fastest that fits"], ...words];
    });
    menu("precision", "Precision of products", () => data.dtypes.map((each) => [each, each]));
    slider("network", "Network between nodes", data.networks, (value) => `${value} ×`,
      "rate of the network over that of the cluster");
    menu("framework", "Framework", () => data.frameworks.map((each) => [each.name, each.title]));
    const prices = make("div", { class: "prices" }), badPrice = note();
    form.append(make("fieldset", { style: "border:0;padding:0" },
      make("legend", { class: "name", style: "padding:0" }, "Dollars per device-hour"), prices, badPrice));
    const inputs = data.clusters.map((each) => {
      const price = make("input", { type: "number", min: 0, max: MOST.price, step: "any", placeholder: "n/a",
        "aria-label": `Dollars per device-hour of ${each.name}`, onchange: () => {
          if (!price.checkValidity()) {
            mark(price, badPrice, `Refused: a price must be 0 to ${whole(MOST.price)}; empty, it is the list price.`);
            return;
          }
          const own = { ...state.prices };
          delete own[each.name];
          if (price.value !== "") own[each.name] = Number(price.value);
          change({ prices: own });
        } });
      prices.append(make("span", {}, each.name), price);
      return [each, price];
    });
    controls.prices = () => {
      for (const [each, price] of inputs) {
        mark(price, badPrice);
        price.value = state.prices[each.name] ?? each.price ?? "";
      }
    };
    const badGrid = note();
    const grid = make("input", { type: "number", min: 0, max: MOST.grid, step: "any", placeholder: "such as 400",
      "aria-label": "Grams of CO2 per kWh", onchange: () => {
        if (grid.checkValidity()) change({ grid: grid.value === "" ? null : Number(grid.value) });
        else mark(grid, badGrid, `Refused: it must be 0 to ${whole(MOST.grid)}, or empty.`);
      } });
    form.append(make("label", {}, make("span", { class: "name" }, "Grams of CO2 per kWh"), grid, badGrid));
    controls.grid = () => {
      mark(grid, badGrid);
      grid.value = state.grid ?? "";
    };
    const link = make("button", { type: "button", onclick: async () => {
      try { await navigator.clipboard.writeText(location.href); link.textContent = "Copied"; }
      catch { prompt("The address of this setting", location.href); }
      setTimeout(() => { link.textContent = "Copy link"; }, 1500);
    } }, "Copy link");
    form.append(link, make("button", { type: "button", onclick: () => change({ ...first, prices: {},
      layout: null }) }, "Reset"));
  }

  // Where numbers come from.
  const cluster = (name = state.cluster) => data.clusters.find((each) => each.name === name);
  const colors = (name) => `var(--c${data.clusters.findIndex((each) => each.name === name) % 6})`;
  const signed = (share) => `${share < 0 ? "-" : share > 0 ? "+" : ""}${digits(Math.abs(share) * 100, 2)} %`;
  // Origin of a step, on its own and in a sentence.
  const origins = (at) => ({
    compiled: ["compiled, as scalejax predict prints it", "the step that XLA's compiler makes of it, which is what scalejax predict prints"],
    kernels: ["as scalejax predict prints it", "the closed form of a framework with kernels of its own, which is what scalejax predict prints"],
    closed_form: [`closed form, not compiled${data.off ? `; those of compiled steps are off by ${signed(data.off[0])} to ${signed(data.off[1])}` : ""}`,
      `a closed form of XLA's step${at.whyNotCompiled ? `; ${at.whyNotCompiled}` : ", which was not compiled"}. It is not what scalejax predict prints${data.off ? `: of the ${whole(data.off[2])} that were compiled it is off by ${signed(data.off[0])} to ${signed(data.off[1])}` : ", which compiles it"}`],
  });
  const origin = (option) => origins(cluster(option.cluster))[option.origin];
  // The remark next to a number that is not what `predict` prints.
  const marked = (option, before) => option.origin === "closed_form" ? [before, make("span", { class: "bad" }, "closed form, not compiled")] : [];
  const source = {
    step: (chosen) => ({
      title: `One step: ${seconds(chosen.step)}`,
      text: `The simulator's prediction of this layout (${chosen.layout}): ${origin(chosen)[1]}. ${chosen.waterfall.map((each) => `${each.name} ${seconds(each.seconds)}`).join(" + ")}. p10 to p90, which hold four of five measurements: ${chosen.p10 === null ? "not known, as no step on this chip was measured" : `${seconds(chosen.p10)} to ${seconds(chosen.p90)}`}.`,
      sources: cluster(chosen.cluster).sources,
    }),
    days: (chosen) => ({
      title: `Time of the run: ${time(chosen.days)}`,
      text: chosen.goodput === null ? "Failures and checkpoints are not included: none are stated for this cluster." : "",
      formula: `updates = ceil(tokens / (global batch × tokens of a sample))\n        = ceil(${whole(state.tokens)} / (${whole(state.batch)} × ${whole(data.tokensPerSample)})) = ${whole(chosen.updates)}\ndays    = updates × step${chosen.goodput === null ? "" : " / goodput"} / 86,400\n        = ${whole(chosen.updates)} × ${seconds(chosen.step)}${chosen.goodput === null ? "" : ` / ${digits(chosen.goodput)}`} / 86,400 s = ${digits(chosen.days, 4)}\np10 to p90: ${chosen.lowDays === null ? "not known" : `${time(chosen.lowDays)} to ${time(chosen.highDays)}`}`,
      sources: [`Tokens: ${state.tokens === first.tokens ? data.tokensSource : "as set on this page"}`, `Step: ${seconds(chosen.step)}, ${origin(chosen)[0]}, scalejax ${data.version}`],
    }),
    cost: (chosen) => ({
      title: chosen.dollars === null ? `Device-hours: ${large(chosen.deviceHours)}` : `Cost: ${dollars(chosen.dollars)}`,
      formula: `device-hours = days × 24 × devices = ${digits(chosen.days, 4)} × 24 × ${whole(chosen.devices)} = ${whole(Math.round(chosen.deviceHours))}${chosen.price === null ? "" : `\ndollars      = device-hours × price = ${whole(Math.round(chosen.deviceHours))} × $${chosen.price} = $${whole(Math.round(chosen.dollars))}`}${chosen.mwh === null ? "" : `\nMWh          = device-hours × watts × PUE / 10^6 = ${whole(Math.round(chosen.deviceHours))} × ${cluster(chosen.cluster).watts} × ${cluster(chosen.cluster).pue ?? "1 (not known)"} / 10^6 = ${digits(chosen.mwh)}`}${chosen.kilograms === null ? "" : `\nkg CO2       = MWh × g for a kWh = ${digits(chosen.mwh)} × ${state.grid} = ${whole(Math.round(chosen.kilograms))}`}`,
      sources: [chosen.cluster in state.prices ? "Price: as set on this page" : cluster(chosen.cluster).priceSource || "Price: none in the cluster's file; set one", ...(cluster(chosen.cluster).wattsSource ? [cluster(chosen.cluster).wattsSource] : [])],
    }),
    memory: (chosen) => ({
      title: `Peak memory of a device: ${gib(chosen.peakBytes)}`,
      text: chosen.fits ? "It fits." : "It does not fit.",
      formula: `parameters, optimizer, batch  ${gib(chosen.stateBytes)}\nactivations, gradients, work  ${gib(chosen.workingBytes)}\nruntime and driver            ${gib(chosen.peakBytes - chosen.stateBytes - chosen.workingBytes)}\npeak                          ${gib(chosen.peakBytes)}\nmemory of a device            ${gib(chosen.memoryBytes)}`,
      sources: cluster(chosen.cluster).sources.filter((each) => /memory|reserve/.test(each)),
    }),
    term: (chosen, term) => ({
      title: `${term.name}: ${seconds(term.seconds)} of a step`,
      text: data.termWords[term.name] || "Time in which devices wait for collectives over these axes of the mesh, with nothing to compute beside them.",
      formula: `${seconds(term.seconds)} of ${seconds(chosen.step)} = ${percent(term.seconds / chosen.step)}`,
      sources: cluster(chosen.cluster).sources,
    }),
    mfu: (chosen) => ({
      title: `MFU: ${percent(chosen.mfu)}`,
      text: "Floating-point operations of the model (recompute not counted) per second, over the peak of the devices (PaLM, arXiv 2204.02311, appendix B).",
      sources: cluster(chosen.cluster).sources.filter((each) => /peak/.test(each)),
    }),
  };

  function limitOf(chosen) {
    const waits = chosen.waterfall.filter((each) => each.name !== "compute");
    const compute = chosen.step - waits.reduce((sum, each) => sum + each.seconds, 0);
    const worst = waits.reduce((most, each) => each.seconds > most.seconds ? each : most, { name: "", seconds: 0 });
    if (compute >= worst.seconds) return { name: "compute", seconds: compute, next: worst };
    return { ...worst, next: { name: "compute", seconds: compute } };
  }

  function drawHead(found) {
    by("title").textContent = data.title;
    by("setting").textContent = `${cluster().title}: ${whole(state.devices)} devices, batch ${whole(state.batch)}, ${large(state.tokens)} tokens, ${state.precision}, network ${state.network} ×, ${state.framework}`;
    const chosen = found.chosen, on = `on ${whole(state.devices)} ${cluster().chip.toUpperCase()} (${cluster().name})`;
    if (!chosen) {
      fill("verdict", make("span", { class: "bad" }, `No answer ${on}: ${found.refused}.`));
      fill("cards");
      return;
    }
    const price = chosen.dollars === null ? `${large(chosen.deviceHours)} device-hours` : dollars(chosen.dollars);
    fill("verdict", `${time(chosen.days)} and ${price} ${on}: `, make("span", { class: chosen.fits ? "good" : "bad" },
      chosen.fits ? "it fits." : "it does not fit."));
    const limit = limitOf(chosen), card = (what, big, more) => make("div", { class: "card" },
      make("div", { class: "what" }, what), make("div", { class: "big" }, big), make("div", { class: "more" }, ...more));
    const energy = chosen.mwh === null ? [] : [`, ${large(chosen.mwh)} MWh`];
    const carbon = chosen.kilograms === null ? [] : [`, ${large(chosen.kilograms / 1000)} t CO2`];
    fill("cards",
      card("Time", number(time(chosen.days), () => source.days(chosen)), [chosen.lowDays === null ? "no range: chip not measured; " : `${time(chosen.lowDays)} to ${time(chosen.highDays)}; `, "step ", number(seconds(chosen.step), () => source.step(chosen)), ...marked(chosen, ", ")]),
      card("Cost", number(chosen.dollars === null ? "set a price" : dollars(chosen.dollars), () => source.cost(chosen)), [`${large(chosen.deviceHours)} device-hours`, ...energy, ...carbon]),
      card("Does it fit?", number(chosen.fits ? "yes" : "no", () => source.memory(chosen)), [`${gib(chosen.peakBytes)} of ${gib(chosen.memoryBytes)}; ${found.isBest ? "best layout" : "chosen layout"}`]),
      card("What limits it", number(limit.name, () => source.term(chosen, limit)), [`${percent(limit.seconds / chosen.step)} of a step; then ${limit.next.name}, ${percent(limit.next.seconds / chosen.step)}`, ...(chosen.mfu === null ? [] : ["; MFU ", number(percent(chosen.mfu), () => source.mfu(chosen))])]));
  }

  // Charts.
  const tip = by("tip");
  function showTip(text, x, y) {
    tip.textContent = text;
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y + 16 + box.height > innerHeight ? y - box.height - 10 : y + 16}px`;
  }
  const hideTip = () => { tip.style.display = "none"; };
  function dot(attributes, words, pick) {
    const shown = (event) => {
      const box = event.currentTarget.getBoundingClientRect();
      showTip(words, event.clientX ?? box.x + box.width, event.clientY ?? box.y);
    };
    return make("circle", { class: "point", tabindex: 0, role: "button", "aria-label": words.replaceAll("\n", ", "), ...attributes,
      onmousemove: shown, onmouseleave: hideTip, onfocus: shown, onblur: hideTip, onclick: () => { hideTip(); pick(); },
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); hideTip(); pick(); } } });
  }
  function ticks(low, high) {
    const found = [], wide = Math.log10(high / low) > 2.2;
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const step of wide ? [1] : Math.log10(high / low) > 0.9 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8])
        if (step * 10 ** power >= low * 0.999 && step * 10 ** power <= high * 1.001) found.push(step * 10 ** power);
    return found.length > 1 ? found : [low, high];
  }
  function frame(id, xs, ys, xWords, yWords, xTitle, xTicks, height = 230) {
    const width = Math.max(240, by(id).clientWidth || 480), left = 52, right = 14, top = 10, bottom = 36;
    const grow = (list, by) => [Math.min(...list) / by, Math.max(...list) * by];
    const [x0, x1] = grow(xs, Math.max(...xs) > Math.min(...xs) ? 1.06 : 1.5), [y0, y1] = grow(ys, Math.max(...ys) > 1.3 * Math.min(...ys) ? 1.05 : 1.3);
    const scale = (value, low, high, from, to) => from + (Math.log(value / low) / Math.log(high / low)) * (to - from);
    const x = (value) => scale(value, x0, x1, left, width - right), y = (value) => scale(value, y0, y1, height - bottom, top);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": xTitle });
    for (const value of ticks(y0, y1)) svg.append(make("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, yWords(value)));
    let last = -Infinity;
    for (const value of xTicks || ticks(x0, x1)) {
      if (x(value) - last < 38) continue;
      last = x(value);
      svg.append(make("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: height - bottom }),
        make("text", { x: x(value), y: height - bottom + 15, "text-anchor": "middle" }, xWords(value)));
    }
    svg.append(make("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, xTitle));
    fill(id, svg);
    return { svg, x, y, top, bottom: height - bottom, left, right: width - right };
  }
  // Values that a logarithmic axis can show, with a margin for its sums; a price of 0 is not one.
  const isDrawable = (value) => value > 1e-30 && value < 1e30;
  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  function overDevices(id, all, value, low, high, words, yWords) {
    const series = all.map(({ name, points }) => ({ name, points: points.filter((each) => isDrawable(value(each.chosen))) }));
    const every = series.flatMap((each) => each.points);
    if (!every.length) { fill(id, make("p", { class: "soft" }, "Nothing to draw at this setting.")); return; }
    const ys = every.flatMap((each) => [value(each.chosen), low(each.chosen) ?? value(each.chosen), high(each.chosen) ?? value(each.chosen)]);
    const at = frame(id, data.devices, ys, whole, yWords, "devices", data.devices);
    for (const { name, points } of series) {
      const band = points.filter((each) => low(each.chosen) !== null);
      if (band.length > 1) at.svg.append(make("path", { fill: colors(name), opacity: 0.14, d: path([...band.map((each) => [at.x(each.devices), at.y(high(each.chosen))]), ...band.toReversed().map((each) => [at.x(each.devices), at.y(low(each.chosen))])]) + "Z" }));
      at.svg.append(make("path", { fill: "none", stroke: colors(name), "stroke-width": 2, d: path(points.map((each) => [at.x(each.devices), at.y(value(each.chosen))])) }));
    }
    for (const { name, points } of series) for (const each of points) {
      const now = each.devices === state.devices && name === state.cluster;
      at.svg.append(dot({ "data-dot": `${id} ${name} ${each.devices}`, cx: at.x(each.devices), cy: at.y(value(each.chosen)), r: now ? 6 : 3.6, fill: each.chosen.fits ? colors(name) : "var(--paper)", stroke: now ? "var(--text)" : colors(name), "stroke-width": 2 },
        `${whole(each.devices)} devices of ${name}\n${words(each.chosen)}\n${each.chosen.layout}${each.chosen.fits ? "" : "\ndoes not fit"}\n${origin(each.chosen)[0]}`,
        () => change({ cluster: name, devices: each.devices })));
    }
  }

  function drawCurves() {
    const series = data.clusters.map(({ name }) => ({ name, points: answers.overDevices(data, { ...state, cluster: name, layout: null }).filter((each) => each.chosen) }));
    fill("legend", ...data.clusters.map((each) => make("span", {}, make("i", { style: `background:${colors(each.name)}` }), each.title)));
    const priced = data.clusters.every((each) => (state.prices[each.name] ?? each.price) !== null);
    const cost = (each) => priced ? each.dollars : each.deviceHours, words = (value) => priced ? dollars(value) : `${large(value)} device-hours`;
    const longest = Math.max(0, ...series.flatMap((each) => each.points.map((point) => point.chosen.days)));
    const [size, unit] = longest >= 3 ? [1, "d"] : longest * 24 >= 3 ? [24, "h"] : longest * 1440 >= 3 ? [1440, "min"] : [86400, "s"];
    const scaled = (value) => value === null ? null : value * size;
    overDevices("days", series, (each) => scaled(each.days), (each) => scaled(each.lowDays), (each) => scaled(each.highDays), (each) => `${time(each.days)}${each.lowDays === null ? "" : ` (${time(each.lowDays)} to ${time(each.highDays)})`}`, (value) => `${digits(value)} ${unit}`);
    const share = (each, days) => days === null ? null : cost(each) * days / each.days;
    overDevices("cost", series, cost, (each) => share(each, each.lowDays), (each) => share(each, each.highDays), (each) => words(cost(each)), (value) => (priced ? "$" : "") + short(value));
    by("cost-heading").textContent = priced ? "Cost over devices" : "Device-hours over devices";
    by("cost-caption").textContent = priced ? "Dollars of the run at the prices set in the form. Both axes are logarithmic." : "A cluster has no price: set one in the form to see dollars. Both axes are logarithmic.";
    return series;
  }

  const TERM_COLORS = { compute: 0, memory: 1, launch: 2, contention: 6, host: 8, overhead: 9, bubble: 4, stragglers: 7, input: 5 };
  const termColor = (name) => `var(--t${TERM_COLORS[name] ?? 3})`;
  function drawStep(found) {
    const chosen = found.chosen;
    if (!chosen) { fill("step"); fill("memory"); by("step-caption").textContent = by("memory-caption").textContent = ""; return; }
    by("step-caption").textContent = `${seconds(chosen.step)}, ${origin(chosen)[0]}: ${chosen.layout}. Compute that hides communication is counted as compute.`;
    let from = 0;
    const rows = [];
    for (const term of chosen.waterfall) {
      if (term.seconds < 5e-4 * chosen.step) { from += term.seconds; continue; }
      rows.push(make("span", {}, term.name), make("span", { class: "track" }, make("i", { style: `left:${100 * from / chosen.step}%;width:${100 * term.seconds / chosen.step}%;background:${termColor(term.name)}` })),
        number(`${seconds(term.seconds)}, ${percent(term.seconds / chosen.step)}`, () => source.term(chosen, term)));
      from += term.seconds;
    }
    rows.push(make("span", { class: "now" }, "step"), make("span", { class: "track" }, make("i", { style: "left:0;width:100%;background:var(--soft)" })), number(seconds(chosen.step), () => source.step(chosen)));
    fill("step", make("div", { class: "bars" }, ...rows));
    const part = (color, words) => make("span", { style: "white-space:nowrap" }, make("i", { style: `display:inline-block;width:.75rem;height:.75rem;border-radius:2px;margin:0 .3rem 0 .1rem;background:var(${color})` }), words);
    fill("memory-caption", `Of ${cluster().title}, by numbers of devices: `, part("--t0", "parameters, optimizer, batch; "), " ", part("--t4", "activations, gradients, workspace; "), " ", part("--t2", "runtime."), ` The line is what a device has, ${gib(chosen.memoryBytes)}.`);
    const all = answers.overDevices(data, { ...state, layout: null }).filter((each) => each.chosen);
    const here = all.map((each) => each.devices === state.devices ? { ...each, chosen } : each);
    const most = Math.max(chosen.memoryBytes, ...here.map((each) => each.chosen.peakBytes)) * 1.04;
    const bars = here.flatMap((each) => {
      const own = each.chosen, parts = [[own.stateBytes, "--t0"], [own.workingBytes, "--t4"], [own.peakBytes - own.stateBytes - own.workingBytes, "--t2"]];
      let at = 0;
      const pieces = parts.map(([bytes, color]) => {
        const piece = make("i", { style: `left:${100 * at / most}%;width:${100 * bytes / most}%;background:var(${color})` });
        at += bytes;
        return piece;
      });
      return [make("span", each.devices === state.devices ? { class: "now" } : {}, whole(each.devices)), make("span", { class: "track" }, ...pieces, make("b", { class: "limit", style: `left:${100 * own.memoryBytes / most}%` })),
        make("span", own.fits ? {} : { class: "bad" }, number(gib(own.peakBytes), () => source.memory(own)), own.fits ? "" : " no")];
    });
    fill("memory", make("div", { class: "bars" }, ...bars));
  }

  function drawMap(found) {
    if (!found.chosen) { fill("map"); fill("map-legend"); return; }
    const own = found.options, limit = found.chosen.memoryBytes / GIB;
    const at = frame("map", own.map((each) => each.step), [...own.map((each) => each.peakBytes / GIB), limit], seconds, (value) => digits(value), "time of a step; upwards: GiB of a device", null);
    at.svg.append(make("line", { x1: at.left, x2: at.right, y1: at.y(limit), y2: at.y(limit), stroke: "var(--bad)", "stroke-width": 1.5, "stroke-dasharray": "5 4" }));
    const choices = answers.offered(own);
    // What can be chosen is drawn last, on top.
    for (const each of own.toReversed()) {
      const now = each.layout === found.chosen.layout, isClosed = each.origin === "closed_form";
      at.svg.append(dot({ "data-dot": `map ${each.layout}`, cx: at.x(each.step), cy: at.y(each.peakBytes / GIB), r: now ? 7 : 5, fill: !each.fits ? "var(--paper)" : isClosed ? "var(--soft)" : colors(state.cluster), "fill-opacity": isClosed ? 0.35 : 1, stroke: now ? "var(--text)" : isClosed ? "var(--soft)" : colors(state.cluster), "stroke-width": 2, "stroke-dasharray": isClosed ? "2 2" : null },
        `${each.layout}\nstep ${seconds(each.step)}, ${time(each.days)}\n${gib(each.peakBytes)}${each.fits ? "" : ": does not fit"}${each.mfu === null ? "" : `\nMFU ${percent(each.mfu)}`}\n${origin(each)[0]}`,
        () => { if (choices.includes(each)) change({ layout: each.layout }); }));
    }
    fill("map-legend", own.some((each) => each.origin === "closed_form") ? `Grey, dashed: ${origins(cluster()).closed_form[0]}${choices.length < own.length ? "; cannot be chosen" : ""}.` : "");
  }

  function drawEven(found) {
    const others = data.clusters.filter((each) => each.name !== state.cluster), parts = [];
    if (!others.length) parts.push(make("p", { class: "soft" }, "Make the page with two clusters or more to compare them."));
    for (const { name, title } of others) {
      const even = answers.breakEven(data, state, name);
      parts.push(make("h3", { style: "font-size:.95rem;margin:.5rem 0 0" }, `${title} instead`));
      if (!even.same || !even.mine) { parts.push(make("p", {}, "It has no answer at this setting.")); continue; }
      const price = even.same.price, lines = [];
      const here = () => price === null ? "; it has no price here." : even.mine.dollars > 0
        ? `; at $${digits(price)} it is ${price <= even.price ? "cheaper" : "dearer"} by ${percent(Math.abs(even.same.dollars / even.mine.dollars - 1))}.`
        : price > 0 ? `; at $${digits(price)} it is dearer, where ${state.cluster} costs nothing.` : "; both cost nothing.";
      lines.push([`On ${whole(state.devices)} devices: `, number(time(even.same.days), () => source.days(even.same)), ...(even.same.dollars === null ? [] : [" and ", number(dollars(even.same.dollars), () => source.cost(even.same))]), ...marked(even.same, ", "), even.same.fits ? "." : "; it does not fit."]);
      const formula = `device-hours here / there = ${whole(Math.round(even.mine.deviceHours))} / ${whole(Math.round(even.same.deviceHours))} = ${digits(even.ratio)}${even.price === null ? "" : `\nbreak-even price = ${even.mine.price} × ${digits(even.ratio)} = $${digits(even.price)}`}`;
      lines.push(even.price === null
        ? ["One of its device-hours is worth ", number(digits(even.ratio), () => ({ title: "Break-even", formula, sources: [] })), ` of those of ${state.cluster}.`]
        : ["As cheap up to ", number(`$${digits(even.price)}`, () => ({ title: "Break-even price", formula, sources: [cluster(name).priceSource || "Price: none in the cluster's file"] })), " per device-hour", here()]);
      lines.push(even.devices === null ? [`None of its device counts on this page takes ${time(even.mine.days)}.`]
        : ["As fast as here with about ", number(whole(Math.round(even.devices)), () => ({ title: "Devices that are as fast", text: "Read off its curve of time over devices, which is straight on logarithms between the numbers that were computed: an estimate, where the other numbers of this page are exact.", sources: [] })), ` of its devices (${time(even.mine.days)}).`]);
      parts.push(make("ul", {}, ...lines.map((line) => make("li", {}, ...line))));
    }
    fill("even", ...parts);
  }

  function cells({ devices, chosen }) {
    const known = (value, words, say) => value === null ? "n/a" : number(words(value), () => say(chosen));
    return [whole(devices), [known(chosen.step, seconds, source.step), ...marked(chosen, " ")], known(chosen.days, time, source.days),
      known(chosen.lowDays, () => `${time(chosen.lowDays)} to ${time(chosen.highDays)}`, source.days),
      known(chosen.deviceHours, large, source.cost), known(chosen.dollars, dollars, source.cost), known(chosen.mwh, large, source.cost),
      known(chosen.mfu, percent, source.mfu), known(chosen.peakBytes, gib, source.memory), chosen.fits ? "yes" : "no"];
  }
  function drawTable(series) {
    const rows = series.flatMap(({ name, points }) => points.map((each) => make("tr", each.devices === state.devices && name === state.cluster ? { class: "now" } : {},
      make("td", {}, name), ...cells(each).map((cell) => make("td", {}, ...[cell].flat())), make("td", { class: "words" }, each.chosen.layout))));
    const heads = ["cluster", "devices", "step", "time", "p10 to p90", "device-hours", "cost", "MWh", "MFU", "memory", "fits", "layout"];
    fill("table", make("table", {}, make("tr", {}, ...heads.map((each) => make("th", { scope: "col", class: each === "layout" ? "words" : null }, each))), ...rows));
  }

  function drawEnd(found) {
    by("command").textContent = found.chosen ? answers.command(data, state, found.chosen) : found.refused;
  }

  function draw() {
    const found = answers.answer(data, state), focused = document.activeElement?.dataset.dot;
    for (const show of Object.values(controls)) show();
    drawHead(found);
    const series = drawCurves();
    drawStep(found);
    drawMap(found);
    drawEven(found);
    drawTable(series);
    drawEnd(found);
    if (focused) {
      // The dot that has the focus was redrawn: focus it again, without its tooltip.
      document.querySelector(`[data-dot="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
      hideTip();
    }
  }

  makeControls();
  fill("sources", make("p", {}, data.method), make("ul", {}, ...data.notes.map((each) => make("li", {}, each))),
    ...data.clusters.flatMap((each) => [make("h3", {}, each.title), make("ul", {}, ...each.sources.map((line) => make("li", {}, line)))]));
  by("footer").textContent = `${data.method} Written by scalejax ${data.version}. This file needs no network; its address holds the setting.`;
  read();
  draw();
  addEventListener("hashchange", () => { read(); draw(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
  addEventListener("beforeprint", () => { by("notes").open = true; });
})();
