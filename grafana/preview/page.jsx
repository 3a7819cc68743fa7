// Draws one dashboard with the components that Grafana's own panels are made of. Not Grafana: heat maps and status
// histories are parts of Grafana itself, and get a line of text instead.
import React from 'react';
import { flushSync } from 'react-dom';
import { createRoot } from 'react-dom/client';
import {
  FieldType, Registry, ThemeContext, VizOrientation, applyFieldOverrides, createDataFrame, createTheme, dateTime,
  getDisplayValueAlignmentFactors, getFieldDisplayValues,
} from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, TimeSeries, VizRepeater } from '@grafana/ui';

const CELL = 30, GAP = 8, COLUMNS = 24, HEADER = 40, SCALARS = ['unit', 'decimals', 'min', 'max', 'color', 'thresholds'];

function registry(fieldConfig) {
  // What Grafana has in its own registry of options, as far as our dashboards use it.
  const names = new Set(Object.keys(fieldConfig.defaults.custom ?? {}));
  for (const rule of fieldConfig.overrides) for (const { id } of rule.properties) names.add(id.replace(/^custom\./, ''));
  const all = { process: (value) => value, shouldApply: () => true, getItemsCount: () => 0 };
  const own = [...names].map((path) => ({ ...all, id: `custom.${path}`, path, isCustom: true, name: path }));
  return new Registry(() => [...SCALARS.map((path) => ({ ...all, id: path, path, name: path })), ...own]);
}

function framesOf(panel, answers, theme) {
  const frames = answers.flatMap(({ refId, series }) => series.map(({ name, labels, times, values }) => createDataFrame({
    refId, name,
    fields: [
      { name: 'Time', type: FieldType.time, values: times, config: {} },
      { name: 'Value', type: FieldType.number, values, labels, config: { displayNameFromDS: name } },
    ],
  })));
  const fieldConfig = panel.fieldConfig;
  // As Grafana does when it loads a dashboard: the first step has no lower end, which JSON cannot say.
  for (const each of fieldConfig.defaults.thresholds?.steps ?? []) each.value ??= -Infinity;
  const how = { fieldConfig, theme, timeZone: 'utc', replaceVariables: (text) => text, fieldConfigRegistry: registry(fieldConfig) };
  return applyFieldOverrides({ ...how, data: frames });
}

function Lines({ panel, frames, width, height, range }) {
  return <TimeSeries frames={frames} timeRange={range} timeZone="utc" width={width} height={height}
    legend={panel.options.legend} options={panel.options} />;
}

function repeated(panel, frames, width, height, theme, drawOne, more) {
  const { reduceOptions, orientation } = panel.options, how = { fieldConfig: panel.fieldConfig, theme, timeZone: 'utc' };
  const getValues = () => getFieldDisplayValues({ ...how, reduceOptions, replaceVariables: (text) => text, data: frames, sparkline: true });
  return <VizRepeater getValues={getValues} renderValue={drawOne} width={width} height={height} source={frames}
    renderCounter={1} orientation={orientation} getAlignmentFactors={getDisplayValueAlignmentFactors} {...more} />;
}

function Stat({ panel, frames, width, height, theme }) {
  const { colorMode, graphMode, justifyMode, textMode: asked } = panel.options;
  const textMode = asked === 'auto' ? (frames.length > 1 ? 'value_and_name' : 'value') : asked;
  const one = ({ value, width, height, alignmentFactors, count }) => <BigValue value={value.display} sparkline={value.sparkline}
    {...{ colorMode, graphMode, justifyMode, textMode, width, height, theme, count }} alignmentFactors={alignmentFactors} />;
  return repeated(panel, frames, width, height, theme, one, { autoGrid: true });
}

function Bars({ panel, frames, width, height, theme }) {
  const { displayMode, valueMode, namePlacement, showUnfilled, minVizWidth, minVizHeight, maxVizHeight } = panel.options;
  const one = ({ value, width, height, orientation, alignmentFactors, count }) => <BarGauge value={value.display} field={value.field}
    {...{ width, height, orientation, displayMode, namePlacement, showUnfilled, theme }} valueDisplayMode={valueMode}
    display={value.view?.getFieldDisplayProcessor(value.colIndex)} itemSpacing={8}
    alignmentFactors={count > 1 ? alignmentFactors : undefined} />;
  return repeated(panel, frames, width, height, theme, one,
    { itemSpacing: 8, minVizWidth, minVizHeight, maxVizHeight, orientation: VizOrientation.Horizontal });
}

const KINDS = { timeseries: Lines, stat: Stat, bargauge: Bars };

function Panel({ panel, answers, x, y, width, height, theme, range }) {
  const Kind = KINDS[panel.type], frames = Kind ? framesOf(panel, answers, theme) : [];
  const missing = Kind ? 'No data' : `${panel.type}: a panel of Grafana itself, not drawn here`;
  return <div style={{ position: 'absolute', left: x, top: y, width, height }}>
    <PanelChrome title={panel.title} description={panel.description} width={width} height={height}>
      {(inner, tall) => Kind && frames.length
        ? <Kind {...{ panel, frames, theme, range }} width={inner} height={tall} />
        : <div data-empty={Kind ? panel.title : undefined} style={{ padding: 16, color: theme.colors.text.secondary }}>{missing}</div>}
    </PanelChrome>
  </div>;
}

function Board({ board, panels, width, theme, range }) {
  const column = width / COLUMNS, bottom = Math.max(...panels.map(({ panel }) => panel.gridPos.y + panel.gridPos.h));
  return <div style={{ position: 'relative', width, height: HEADER + bottom * (CELL + GAP) }}>
    <h4 style={{ padding: '8px 4px' }}>{board.title}</h4>
    {panels.map(({ panel, answers }, number) => {
      const { x, y, w, h } = panel.gridPos;
      return <Panel key={number} {...{ panel, answers, theme, range }} x={x * column + GAP / 2} y={HEADER + y * (CELL + GAP)}
        width={w * column - GAP} height={h * CELL + (h - 1) * GAP} />;
    })}
  </div>;
}

window.draw = ({ board, panels, from, to, dark, width }) => {
  const theme = createTheme({ colors: { mode: dark ? 'dark' : 'light' } });
  const range = { from: dateTime(from), to: dateTime(to), raw: { from: dateTime(from), to: dateTime(to) } };
  document.body.style.background = theme.colors.background.canvas;
  document.body.style.margin = 0;
  flushSync(() => createRoot(document.getElementById('board')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Board {...{ board, panels, width, theme, range }} />
    </ThemeContext.Provider>,
  ));
};
