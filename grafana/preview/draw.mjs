// Asks a Prometheus for everything that the dashboards show, and draws each of them as a picture:
//   npm install && node draw.mjs --prometheus http://127.0.0.1:9090 --minutes 15 --out pictures
import { mkdirSync, readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { build } from 'esbuild';
import { chromium } from 'playwright-core';

const HERE = import.meta.dirname, POINTS = 240;
const FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking'];
const { values: asked } = parseArgs({ options: {
  prometheus: { type: 'string', default: 'http://127.0.0.1:9090' },
  run: { type: 'string', default: '' }, // the newest
  minutes: { type: 'string', default: '15' },
  out: { type: 'string', default: 'pictures' },
  chromium: { type: 'string', default: '/usr/bin/chromium' },
  width: { type: 'string', default: '1600' },
  light: { type: 'boolean', default: false },
} });
const to = Date.now(), seconds = Number(asked.minutes) * 60, step = Math.max(1, Math.round(seconds / POINTS));
const start = Math.floor(to / 1000 / step) * step - Math.ceil(seconds / step) * step;

async function ask(what, words) {
  const answer = await fetch(`${asked.prometheus}/api/v1/${what}?${new URLSearchParams(words)}`);
  const told = await answer.json();
  if (told.status !== 'success') throw new Error(`${words.query ?? words['match[]']}: ${told.error}`);
  return told.data;
}

async function newestRun() {
  const found = (await ask('query', { query: 'topk(1, timestamp(fedel_run_active) * fedel_run_active)' })).result;
  const any = found.length ? found : (await ask('query', { query: 'fedel_run_active' })).result;
  if (!any.length) throw new Error(`${asked.prometheus} knows no run of FedEL: does it scrape a coordinator?`);
  return any[0].metric.run;
}

function filled(expr, variables) {
  // Longer names first: $__range is the beginning of another one in other dashboards.
  return Object.entries(variables).sort(([a], [b]) => b.length - a.length)
    .reduce((text, [name, value]) => text.replaceAll(`$${name}`, value), expr);
}

function legend(format, labels) {
  if (format !== '__auto') return format.replace(/\{\{(\w+)\}\}/g, (_, name) => labels[name] ?? '');
  const shown = Object.entries(labels).filter(([name]) => name !== '__name__').map(([name, value]) => `${name}="${value}"`);
  return `${labels.__name__ ?? ''}{${shown.join(', ')}}`;
}

async function answer(target, variables) {
  const query = filled(target.expr, variables);
  const data = target.instant
    ? await ask('query', { query, time: to / 1000 })
    : await ask('query_range', { query, start, end: to / 1000, step });
  const series = data.result.map(({ metric, value, values }) => {
    const samples = new Map((values ?? [value]).map(([time, text]) => [Number(time), Number(text)]));
    const times = [];
    if (values) for (let time = start; time <= to / 1000; time += step) times.push(time);
    const grid = values ? times : [...samples.keys()];
    return { name: legend(target.legendFormat, metric), labels: metric, times: grid.map((time) => time * 1000),
      values: grid.map((time) => (Number.isFinite(samples.get(time)) ? samples.get(time) : null)) };
  });
  return { refId: target.refId, series };
}

function placed(panels, clients) {
  // Open the rows, and draw a panel that repeats once for each client.
  return panels.flatMap((panel) => {
    if (panel.type !== 'row') return [{ panel, variables: {} }];
    return panel.panels.flatMap((inner) => clients.map((client, number) => {
      const { w, h, y } = inner.gridPos, across = inner.maxPerRow ?? 1;
      const gridPos = { x: (number % across) * w, y: y + Math.floor(number / across) * h, w, h };
      return { panel: { ...inner, gridPos, title: inner.title.replace('$client', client) }, variables: { client } };
    }));
  });
}

const bundle = await build({ entryPoints: [join(HERE, 'page.jsx')], bundle: true, write: false, outdir: 'out', format: 'iife', jsx: 'automatic',
  loader: { '.svg': 'text', '.png': 'dataurl', '.ttf': 'empty' }, define: { 'process.env.NODE_ENV': '"production"', global: 'window' }, logLevel: 'error' });
const built = (ending) => bundle.outputFiles.find(({ path }) => path.endsWith(ending)).text;
const run = asked.run || (await newestRun());
const clients = (await ask('label/client/values', { 'match[]': `fedel_client_budget_deviation_ratio{run="${run}"}` })).sort();
const scrape = 5, rate = `${Math.max(4 * scrape, step + scrape)}s`;
const variables = { run, client: '.*', __rate_interval: rate, __range: `${seconds}s` };
const browser = await chromium.launch({ executablePath: asked.chromium, args: FLAGS });
mkdirSync(asked.out, { recursive: true });
const folder = join(HERE, '..', 'dashboards');
for (const file of readdirSync(folder).sort()) {
  const board = JSON.parse(readFileSync(join(folder, file), 'utf-8')), panels = [];
  for (const { panel, variables: own } of placed(board.panels, clients)) {
    const answers = await Promise.all(panel.targets.map((target) => answer(target, { ...variables, ...own })));
    panels.push({ panel, answers });
  }
  const width = Number(asked.width), page = await browser.newPage({ viewport: { width, height: 900 } });
  page.on('pageerror', (error) => console.error(`${file}: ${error}`));
  // The components need a page with an origin; nothing is fetched for it.
  await page.route('**/*', (route) => route.fulfill({ contentType: 'text/html', body: '<!doctype html><div id="board"></div>' }));
  await page.goto('http://preview/');
  await page.addStyleTag({ content: built('.css') });
  await page.addScriptTag({ content: built('.js') });
  await page.evaluate((what) => window.draw(what), { board, panels, from: start * 1000, to, dark: !asked.light, width });
  await page.waitForTimeout(500); // plots are drawn in animation frames
  const empty = await page.locator('[data-empty]').evaluateAll((found) => found.map((each) => each.dataset.empty));
  const picture = join(asked.out, file.replace('.json', '.png'));
  await page.screenshot({ path: picture, fullPage: true });
  await page.close();
  console.log(`${picture}: ${panels.length} panels${empty.length ? `, no data: ${empty.join(', ')}` : ''}`);
}
await browser.close();
