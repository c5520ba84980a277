// Writes a TypeScript file that gives each dashboard the types of @grafana/schema. tsc then checks
// the JSON's shape: unknown keys, wrong values and missing ones are errors.
//
// Usage: node check.mjs DASHBOARDS OUT.ts

import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const [folder, out] = process.argv.slice(2);
const composable = "@grafana/schema/dist/esm/raw/composable";
const panels = { timeseries: "TimeSeries", heatmap: "Heatmap", stat: "Stat" };

let text = 'import type { Dashboard, Panel, RowPanel } from "@grafana/schema";\n';
for (const [type, name] of Object.entries(panels)) {
    const file = `${composable}/${type}/panelcfg/x/${name}PanelCfg_types.gen.d.ts`;
    text += `import type * as ${type} from "${file}";\n`;
}
// JSON has the values of the enums, not their names. Its numbers and strings must still be among
// those values. TypeScript has no type for the keys that Grafana adds to a target or a panel.
text += `
type Json<T> = unknown extends T ? T
    : T extends string ? \`\${T}\`
    : T extends number ? (\`\${T}\` extends \`\${infer N extends number}\` ? N : never)
    : T extends boolean | null | undefined ? T
    : { [K in keyof T]: Json<T[K]> };
type Whole = Json<Omit<Dashboard, "panels">> & { panels: unknown[] };
`;

let count = 0;
function check(type, value, place) {
    text += `// ${place}\nexport const check${count++}: ${type} = ${JSON.stringify(value)};\n`;
}

for (const name of readdirSync(folder).filter((name) => name.endsWith(".json")).sort()) {
    const dashboard = JSON.parse(readFileSync(join(folder, name), "utf8"));
    check("Whole", { ...dashboard, panels: [] }, name);
    for (const panel of dashboard.panels) {
        const place = `${name}: ${panel.title}`;
        if (panel.type === "row") {
            check("Json<RowPanel>", panel, place);
            continue;
        }
        if (!(panel.type in panels)) throw new Error(`${place}: no type for ${panel.type}`);
        check("Json<Panel>", panel, place);
        check(`Json<Partial<${panel.type}.Options>>`, panel.options, `${place}, options`);
        if (panel.type !== "stat") {
            const custom = panel.fieldConfig.defaults.custom;
            check(`Json<Partial<${panel.type}.FieldConfig>>`, custom, `${place}, field`);
        }
    }
}
if (count < 80) throw new Error(`only ${count} parts were found`);
writeFileSync(out, text);
