#!/usr/bin/env bash
# Hold the dashboards against Grafana's own schema: its TypeScript types, of the version that compose.yaml runs.
# Needs npm, and installs @grafana/schema and typescript into a temporary directory.
set -euo pipefail
cd "$(dirname "$0")"
version=$(sed -nE 's#.*image: grafana/grafana:([0-9.]+)(@.*)?$#\1#p' ../compose.yaml)
dashboards=("$PWD"/dashboards/*.json)
working=$(mktemp -d)
trap 'rm -rf "$working"' EXIT
cd "$working"
npm install --silent --no-audit --no-fund "@grafana/schema@$version" typescript@5.9 >/dev/null

cat >known.ts <<'TS'
import type { AnnotationQuery, Dashboard, DataQuery, FieldConfig, FieldConfigSource, Panel, RowPanel } from '@grafana/schema';
import type { Options as StatOptions } from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type {
  FieldConfig as SeriesField,
  Options as SeriesOptions,
} from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// JSON holds the text of an enum's member.
type Json<T> = unknown extends T ? T
  : T extends string ? `${T}`
  : T extends number | boolean | null | undefined ? T
  : T extends (infer Item)[] ? Json<Item>[]
  : { [Key in keyof T]: Json<T[Key]> };

// The schema leaves the parts of each panel's kind, and of Prometheus' queries, open; Grafana fills in what options lack.
type Query = DataQuery & { expr: string; legendFormat: string; instant?: boolean };
type Of<Kind, Options, Custom> = Omit<Panel, 'type' | 'options' | 'targets' | 'fieldConfig'> & {
  type: Kind;
  options: Options;
  targets: Query[];
  fieldConfig: Omit<FieldConfigSource, 'defaults'> & { defaults: Omit<FieldConfig, 'custom'> & { custom?: Custom } };
};
type Event = AnnotationQuery & { expr: string; step: string; titleFormat: string };
export type Known = Json<
  Omit<Dashboard, 'panels' | 'annotations'> & {
    annotations: { list: Event[] };
    panels: (Of<'stat', Partial<StatOptions>, never> | Of<'timeseries', SeriesOptions, Partial<SeriesField>> | RowPanel)[];
  }
>;
TS
for dashboard in "${dashboards[@]}"; do
    { echo "import type { Known } from './known';" && echo -n "export const dashboard: Known = " && cat "$dashboard"; } >dashboard.ts
    npx tsc --noEmit --strict --skipLibCheck --target es2022 --module esnext --moduleResolution node10 dashboard.ts
    echo "$(basename "$dashboard"): fits @grafana/schema $version"
done
