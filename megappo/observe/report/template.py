"""The page. Jinja escapes everything; the content policy forbids scripts and requests to anywhere."""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ css }}</style>
</head>
<body>
{% macro dot(i) %}<i style="background:{{ colours[i] }}"></i>{% endmacro %}
{% macro table(t, kind="") %}
<div class="wide fit"><table class="numbers {{ kind }}">
<thead>
{% if t.groups %}<tr><th></th>{% for name, i, columns in t.groups -%}
<th colspan="{{ columns }}" class="run">{{ dot(i) }}{{ name }}</th>{% endfor %}</tr>{% endif %}
<tr>{% for cell in t.head %}<th>{{ cell }}</th>{% endfor %}</tr>
</thead>
<tbody>
{% for row in t.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endmacro %}
<nav>{% for anchor, name in links %}<a href="#{{ anchor }}">{{ name }}</a>{% endfor %}</nav>
<main>
<header id="overview">
<h1>{{ title }}</h1>
<div class="runs">
{% for run in runs %}<section class="card">
<h2>{% if several %}{{ dot(loop.index0) }}{% endif %}{{ run.name }}</h2>
<dl>{% for name, text in run.facts %}<dt>{{ name }}</dt><dd>{{ text }}</dd>{% endfor %}</dl>
{% for note in run.notes %}<p class="note">{{ note }}</p>{% endfor %}
</section>
{% endfor %}</div>
</header>

<section id="numbers"><h2>Numbers</h2>
{{ table(final) }}
</section>

{% if events %}<section id="events"><h2>Guard events</h2>
<div class="wide"><table class="events">
<thead><tr><th>#</th>{% if several %}<th>Run</th>{% endif %}<th>Iteration</th><th>Rule</th><th>Metric</th>
<th>Value</th><th>Condition</th><th>Actions</th><th>Message</th></tr></thead>
<tbody>
{% for number, run, colour, e in events %}<tr><td>{{ number }}</td>
{%- if several %}<td class="run"><i style="background:{{ colour }}"></i>{{ run }}</td>{% endif -%}
<td>{{ e.step }}</td><td>{{ e.rule }}</td><td class="mono">{{ e.metric }}</td><td>{{ e.value }}</td>
<td>{{ e.condition }}</td><td>{{ e.actions }}</td>
<td>{{ e.message }}</td></tr>
{% endfor %}</tbody>
</table></div>
{% if more_events %}<p class="note">… and {{ more_events }} more in events.jsonl.</p>{% endif %}
</section>{% endif %}

{% for section in sections %}<section id="{{ section.anchor }}">
{% if section.folded %}<details><summary><h2>{{ section.name }}</h2> ({{ section.pictures | length }})</summary>
{% else %}<h2>{{ section.name }}</h2>
{% endif -%}
{% if section.note %}<p class="hint">{{ section.note }}</p>
{% endif -%}
<div class="charts">
{% for p in section.pictures %}<figure><img alt="{{ p.title }}" src="{{ p.svg }}">
<figcaption>{{ p.metrics }}</figcaption></figure>
{% endfor %}</div>{% if section.folded %}</details>{% endif %}
</section>
{% endfor %}

{% if samples %}<section id="samples"><h2>Samples</h2>
{% for run, colour, groups in samples %}
{% if several %}<h3><i style="background:{{ colour }}"></i>{{ run }}</h3>{% endif %}
{% for group in groups %}<details{% if loop.first %} open{% endif %}>
<summary>{{ group.title }}: {{ group.chosen | length }} of {{ group.total }}, by {{ group.by }}</summary>
<div class="wide"><table class="samples">
<thead><tr><th>Quantile</th><th>Value</th><th>Prompt</th><th>Response</th><th>Expected</th></tr></thead>
<tbody>
{% for name, s in group.chosen %}<tr><td>{{ name }}</td><td>{{ show(s.score) }}<br><small>{{ s.source }}</small></td>
<td><pre>{{ s.prompt }}</pre></td><td><pre>{{ s.response }}</pre></td><td><pre>{{ s.truth }}</pre></td></tr>
{% endfor %}</tbody>
</table></div></details>
{% endfor %}{% endfor %}
</section>{% endif %}

<section id="configuration"><h2>Configuration</h2>
{% if different %}<h3>Settings that differ</h3>
<div class="wide"><table class="settings">
<thead><tr><th>Key</th>{% for run in runs %}<th>{{ dot(loop.index0) }}{{ run.name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in different %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% endif %}
{% for run in runs %}{% if run.config %}<details><summary>{{ run.name }}: all settings</summary>
<pre class="config">{{ run.config }}</pre></details>
{% else %}<p class="note">{{ run.name }}: not found.</p>
{% endif %}{% endfor %}
</section>

<section id="metrics"><details><summary><h2>All metrics</h2></summary>
{{ table(metrics, "all") }}
</details></section>
<footer>megappo {{ version }}, {{ made }}</footer>
</main>
</body>
</html>
"""

CSS = """
:root { --ink: #1f2933; --soft: #5b6672; --line: #e3e7eb; --paper: #ffffff; --back: #f6f7f9; --link: #0b66b0; }
* { box-sizing: border-box; }
html { scroll-padding-top: 48px; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
nav { position: sticky; top: 0; z-index: 1; background: var(--paper); border-bottom: 1px solid var(--line);
  padding: 8px 24px; display: flex; flex-wrap: wrap; gap: 2px 18px; }
nav a { color: var(--link); text-decoration: none; font-size: 14px; }
nav a:hover { text-decoration: underline; }
main { max-width: 1420px; margin: 0 auto; padding: 8px 24px 40px; }
h1 { font-size: 25px; margin: 18px 0 14px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 30px 0 10px; }
h3 { font-size: 15px; margin: 18px 0 8px; }
i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px; }
.runs { display: flex; flex-wrap: wrap; gap: 14px; }
.card { flex: 1 1 380px; background: var(--paper); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 18px; min-width: 0; }
.card h2 { margin: 2px 0 8px; font-size: 16px; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; font-size: 14px; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.note { color: #7a5200; background: #fff8e6; border-left: 3px solid #e0a82e; padding: 5px 11px; margin: 10px 0 4px;
  font-size: 13.5px; border-radius: 0 5px 5px 0; overflow-wrap: anywhere; }
.hint { color: var(--soft); font-size: 13.5px; margin: 0 0 8px; overflow-wrap: anywhere; }
.wide { overflow-x: auto; background: var(--paper); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { padding: 5px 12px; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; background: #fafbfc; }
tbody tr:last-child td { border-bottom: 0; }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.wide.fit { width: fit-content; max-width: 100%; }
.numbers th.run:not(:first-child) { text-align: center; color: var(--ink); border-left: 1px solid var(--line); }
.all td:first-child, .settings td, .mono { font-family: ui-monospace, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; font-size: 12.5px; }
.events td.run { white-space: nowrap; }
.settings td { overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(520px, 1fr)); gap: 14px; }
@media (max-width: 620px) { .charts { grid-template-columns: 1fr; } main { padding: 4px 10px 30px; } }
figure { margin: 0; background: var(--paper); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px 8px; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font: 11.5px/1.4 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  margin-top: 6px; overflow-wrap: anywhere; }
details { margin: 8px 0; }
summary { cursor: pointer; }
summary h2 { display: inline; }
summary { padding: 4px 0; }
.samples th:nth-child(-n+2), .samples td:nth-child(-n+2) { white-space: nowrap; }
pre { margin: 0; font: 12.5px/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 320px; overflow-y: auto; }
pre.config { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px;
  max-height: 560px; }
small { color: var(--soft); }
footer { color: var(--soft); font-size: 12.5px; margin-top: 34px; }
@media print { nav { display: none; } figure, .card { break-inside: avoid; } }
"""
